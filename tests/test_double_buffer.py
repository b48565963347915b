from nanovllm.utils.double_buffer import DoubleBuffer


def test_double_buffer_alternates():
    buffers = DoubleBuffer("a", "b")
    assert [buffers.current, buffers.advance(), buffers.current, buffers.buffer_index] == ["a", "a", "b", 1]
    assert [buffers.advance(), buffers.advance(), buffers.current] == ["b", "a", "b"]
    buffers.reset()
    assert buffers.current == "a" and buffers.buffer_index == 0
