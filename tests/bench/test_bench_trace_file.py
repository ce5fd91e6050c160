# ── reading ──


def test_a_trace_is_read_as_it_was_recorded(tmp_path):
    visits = [Visit((0, 1), 600), Visit((0, 2, 3), 1536)]
    assert read_trace(written(tmp_path / "a.jsonl", visits)) == visits


@pytest.mark.parametrize(
    "line",
    [
        "",
        "[]",
        '{"input_length": 10}',
        '{"input_length": 10, "hash_ids": []}',
        '{"input_length": 0, "hash_ids": [7]}',
        '{"input_length": 600, "hash_ids": [7]}',
        '{"input_length": 10, "hash_ids": [7, 8]}',
        '{"input_length": 10, "hash_ids": [-7]}',
        '{"input_length": 10, "hash_ids": [2147483648]}',
        '{"input_length": 600, "hash_ids": [7, 1]}',  # 1 follows 0 in the first line
        '{"input_length": 520, "hash_ids": [0, 1]}',  # and stands for 88 tokens
    ],
)
def test_a_line_that_is_no_request_is_named(tmp_path, line):
    path = written(tmp_path / "a.jsonl", [Visit((0, 1), 600)])
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(EmberkeepError, match=r"^a\.jsonl, line 2 is not a request"):
        read_trace(path)


def test_an_empty_trace_is_refused(tmp_path):
    with pytest.raises(EmberkeepError, match="is empty"):
        read_trace(written(tmp_path / "a.jsonl", []))


