"""Counters of programs: whose they are, and that launches leave them zero; on a CUDA device, in graphs and on several streams."""

import pytest
import torch

from dsv4.kernels import hyper_connection, router

pytest.importorskip("triton", reason="Triton has no wheel for this platform")


def test_counters_of_a_stream_are_its_own_and_zero():
    from dsv4.kernels import _arrival_triton as arrivals

    cpu = torch.device("cpu")
    one = arrivals.counters(cpu, 2)
    assert one.dtype == torch.int32
    assert one.tolist() == [0, 0]
    assert arrivals.counters(cpu, 1).data_ptr() == one.data_ptr()


def test_counters_never_overlap_and_never_run_out(monkeypatch):
    from dsv4.kernels import _arrival_triton as arrivals

    monkeypatch.setattr(arrivals, "OF_DEVICE", 5)
    held = arrivals._Counters(torch.device("cpu"))
    taken = [held.take(2) for _ in range(4)]
    for i, counter in enumerate(taken):
        assert counter.tolist() == [0, 0]
        counter += i + 1
    assert [counter.tolist() for counter in taken] == [[i + 1] * 2 for i in range(4)]


def works() -> list:
    """Calls of which each ends in the last program to arrive, of several sizes."""
    torch.manual_seed(0)
    found = []
    for tokens in (1, 5, 16):
        x, out = torch.randn(1, tokens, 4, 4096), torch.randn(1, tokens, 4096)
        write = (x, torch.rand(1, tokens, 4, 4), torch.rand(1, tokens, 4), out)
        read = (torch.randn(24, 4 * 4096) * 4096**-0.5, torch.ones(3), torch.randn(24), torch.ones(4096), 20, 1e-6, 1e-6, 1e-6)
        route = (torch.randn(tokens, 4096), torch.randn(256, 4096) / 64, torch.randn(256), None, None, None, 6, 1.5)
        for op, given in ((hyper_connection.fused_write_read, (*write, *read)), (router.fused_router, route)):
            given = [t.cuda() if isinstance(t, torch.Tensor) else t for t in given]
            found.append(lambda op=op, given=given: op(*given))
    return found


def captured(work) -> tuple[torch.cuda.CUDAGraph, tuple[torch.Tensor, ...]]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = work()
    return graph, out


def check_equal(found, expected) -> None:
    for got, value in zip(found, expected, strict=True):
        assert torch.equal(got, value)


@pytest.mark.gpu
def test_native_order_of_arrival_does_not_matter():
    for work in works():
        expected = work()
        for _ in range(200):
            check_equal(work(), expected)


@pytest.mark.gpu
def test_native_graphs_and_streams():
    """Graphs replayed at once, beside launches on other streams."""
    made = works()
    expected = [work() for work in made]
    graphs = [captured(work) for work in made]
    streams = [torch.cuda.Stream() for _ in made]
    torch.cuda.synchronize()
    for _ in range(50):
        loose = []
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                graphs[i][0].replay()
                loose.append(made[-1 - i]())
        torch.cuda.synchronize()
        for i, (_, out) in enumerate(graphs):
            check_equal(out, expected[i])
            check_equal(loose[-1 - i], expected[i])
