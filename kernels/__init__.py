"""Ops of dsv4: each a plain torch definition, imported as `dsv4.kernels`."""
