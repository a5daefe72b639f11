"""Variables of launchers that are wrong: one line each, at once, and no traceback."""

import socket
import sys

from ranks import free_port, run

from wandistiller.distributed.launchers import LAUNCHERS, environment_problems, is_first

RIGHT = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


def test_an_address_that_is_not_known_is_named() -> None:
    (problem,) = environment_problems(RIGHT | {"MASTER_ADDR": "no.such.host.invalid"})
    assert "MASTER_ADDR is 'no.such.host.invalid', which this machine does not" in problem


def test_a_rank_without_its_world_is_named() -> None:
    (problem,) = environment_problems({"RANK": "0"})
    assert "WORLD_SIZE and MASTER_ADDR and MASTER_PORT is not" in problem


def test_a_port_in_use_is_named_on_rank_0_with_the_flag_for_another_but_not_under_torchrun() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", port := free_port()))  # which nothing takes when it is free again
        other.listen()
        env = RIGHT | {"RANK": "0", "LOCAL_RANK": "0", "MASTER_PORT": str(port)}
        (problem,) = environment_problems(env)
        assert f"port {port} of this machine" in problem and f"--master_port {port + 1}" in problem
        assert environment_problems(env | {"TORCHELASTIC_USE_AGENT_STORE": "True"}) == []
        assert environment_problems(env | {"RANK": "1"}) == []
    assert environment_problems(env) == []


def test_a_run_of_one_rank_takes_another_port_where_its_launcher_s_is_in_use() -> None:
    with socket.create_server(("127.0.0.1", free_port())) as other:
        port = f"{other.getsockname()[1]}"
        env = RIGHT | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": port}
        code = "from wandistiller.distributed.collectives import init; init()"
        assert run([sys.executable, "-c", code], **env).returncode == 0


def test_a_command_says_it_on_stderr_and_ends_with_2() -> None:
    done = run([sys.executable, "-m", "wandistiller", "doctor"], code=2, RANK="0")
    assert done.stderr.startswith("error: environment: RANK is set, but WORLD_SIZE")
    assert len(done.stderr.splitlines()) == 1


def test_one_process_alone_is_the_first_under_every_launcher() -> None:
    rank_of = {"RANK": {}} | {names[0]: dict.fromkeys(names, "2") for names in LAUNCHERS.values()}
    for name, env in rank_of.items():
        assert [is_first(env | {name: number}) for number in "01"] == [True, False]
    assert is_first({})
