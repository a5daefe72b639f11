"""Lines of rank 0, which the other ranks write to their files."""

import pytest

from wandistiller.distributed.collectives import log0


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_line_with_a_per_cent_sign_is_logged_on_every_rank(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, rank: str
) -> None:
    monkeypatch.setenv("RANK", rank)
    with caplog.at_level("INFO"):
        log0("50 % of the steps, into runs/100%")
        log0("%s is %d %%", "runs/100%", 50)
    assert [record.getMessage() for record in caplog.records] == [
        "50 % of the steps, into runs/100%",
        "runs/100% is 50 %",
    ]
