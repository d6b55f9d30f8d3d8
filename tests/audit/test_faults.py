"""The list of faults that a run survives with the scores of one that met none: every kind has a
test that compares them, and docs/how_we_know.md lists the same kinds."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

KILLS, DAMAGE, REPAIR = (f"tests/audit/test_{name}.py" for name in ("kills", "damage", "repair"))
ABSENT, POOLS = "tests/audit/test_absent.py", "tests/campaign/test_pools.py"
SIGNAL = f"{KILLS}::test_a_process_that_meets_a_signal_while_writing_is_gone_on_from"
DAMAGED = f"{DAMAGE}::test_a_damaged_file_is_made_again_with_the_same_scores"
NONSENSE = f"{DAMAGE}::test_an_empty_file_or_one_of_nonsense_is_made_again"
ON_RAY = f"{KILLS}::test_a_killed_client_and_a_killed_worker_change_no_score"
HANGS = f"{POOLS}::test_an_attack_that_hangs_here_is_ended_and_tried_again"
HANGS_ON_RAY = f"{POOLS}::test_an_attack_that_hangs_on_a_worker_is_ended_and_tried_again"

FAULTS = {
    "killed between any two writes": f"{KILLS}::test_a_run_killed_between_any_two_writes_goes_on",
    "killed in the middle of a write": (
        f"{KILLS}::test_a_run_killed_while_it_writes_leaves_nothing_behind"
    ),
    "SIGTERM": f"{SIGNAL}[SIGTERM]",
    "Ctrl-C": f"{SIGNAL}[SIGINT]",
    "SIGKILL, with the lock left behind": (
        f"{KILLS}::test_a_second_process_is_told_of_the_first_and_takes_over_when_that_is_dead"
    ),
    "disk full at any write": (
        f"{KILLS}::test_a_disk_full_at_any_write_loses_nothing_that_was_done"
    ),
    "small disk that is really full": (
        f"{KILLS}::test_a_disk_that_is_really_full_is_an_error_and_more_room_goes_on"
    ),
    "vault that cannot be written": (
        f"{KILLS}::test_a_full_vault_stops_the_run_and_fails_no_client"
    ),
    "read-only directory": f"{KILLS}::test_a_read_only_directory_is_one_sentence",
    "clocks that jump by days": f"{KILLS}::test_clocks_that_jump_change_no_score",
    "server with a memory, cut between rounds": (
        f"{KILLS}::test_a_strategy_with_a_memory_goes_on_where_it_was"
    ),
    "process of a client killed": ON_RAY,
    "attack worker killed": ON_RAY,
    "node of a cluster killed": (
        "tests/cluster/test_local.py::"
        "test_a_node_that_dies_mid_attack_loses_nothing_and_one_added_later_is_used"
    ),
    "file cut in half": f"{DAMAGED}[half]",
    "file deleted": f"{DAMAGED}[deleted]",
    "file emptied": f"{NONSENSE}[emptied]",
    "file replaced by nonsense": f"{NONSENSE}[garbage]",
    "one bit turned, in every kind of file": (
        f"{DAMAGE}::test_a_bit_that_turned_is_told_with_the_name_of_its_file_and_changes_no_score"
    ),
    "scores and summary edited by hand": (
        f"{DAMAGE}::test_scores_and_a_summary_that_somebody_edited_are_worked_out_again"
    ),
    "spec.yaml damaged": (
        f"{DAMAGE}::test_a_damaged_spec_is_written_again_from_the_record_and_told"
    ),
    "vault gone": f"{DAMAGE}::test_a_vault_that_is_gone_is_filled_again",
    "vault whose key is elsewhere": (
        f"{DAMAGE}::test_a_vault_whose_key_is_elsewhere_is_left_alone_and_its_owner_told"
    ),
    "files of two clients or rounds that changed places": (
        f"{DAMAGE}::test_files_that_changed_places_are_made_again_with_the_same_scores"
    ),
    "round folders that changed places": (
        f"{REPAIR}::test_rounds_that_changed_places_are_done_again_from_weights_of_their_own"
    ),
    "weights of two rounds that changed places": (
        f"{REPAIR}::test_weights_that_changed_places_are_no_start_for_a_round"
    ),
    "weights of another run": f"{REPAIR}::test_weights_of_another_run_are_no_start_for_a_round",
    "checkpoint of another run": (
        f"{REPAIR}::test_a_checkpoint_of_another_run_is_told_and_not_gone_on_from"
    ),
    "weights of a round lost, and of the one before": (
        f"{REPAIR}::test_weights_of_an_earlier_round_serve_where_those_of_the_round_are_lost"
    ),
    "checkpoint that counts other rounds": (
        f"{REPAIR}::test_a_checkpoint_that_never_counted_its_rounds_is_damaged"
    ),
    "checkpoint of clients elsewhere damaged": (
        f"{DAMAGE}::test_clients_elsewhere_lose_no_round_with_a_damaged_checkpoint"
    ),
    "result of another observation": (
        f"{DAMAGE}::test_a_result_of_another_observation_is_made_again"
    ),
    "notebook of a long attack damaged": (
        f"{DAMAGE}::test_a_damaged_notebook_starts_the_attack_afresh"
    ),
    "memory of an attack that learns damaged": (
        "tests/attacks/test_giml.py::test_a_damaged_memory_is_learned_again"
    ),
    "client that raises": f"{ABSENT}::test_a_run_with_a_client_that_raises_goes_on",
    "client that uploads NaN": f"{ABSENT}::test_a_run_with_a_client_that_uploads_nan_goes_on",
    "client that stays silent": f"{ABSENT}::test_a_run_with_a_client_that_stays_silent_goes_on",
    "attack that loops for ever": f"{HANGS}[loop]",
    "attack that sleeps for ever": f"{HANGS}[sleep]",
    "attack that reports one step for ever": f"{HANGS}[reports]",
    "attack that hangs on a worker": f"{HANGS_ON_RAY}[sleep]",
}
COMPARES = {"assert_same", "assert_frame_equal", "equals"}


def named(test: str) -> tuple[ast.Module, str, str]:
    """The module that a test is in, the name of its function, and its parameter."""
    file, _, rest = test.partition("::")
    function, _, parameter = rest.partition("[")
    return ast.parse((ROOT / file).read_text()), function, parameter.rstrip("]")


def calls(module: ast.Module, name: str, seen: frozenset[str] = frozenset()) -> set[str]:
    """Everything that a function of a module calls, also through others of that module."""
    functions = {node.name: node for node in module.body if isinstance(node, ast.FunctionDef)}
    if name not in functions or name in seen:
        return set()
    own = {
        node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        for node in ast.walk(functions[name])
        if isinstance(node, ast.Call)
    }
    return own.union(*(calls(module, other, seen | {name}) for other in own))


def test_there_are_at_least_twenty_kinds_of_fault() -> None:
    assert len(FAULTS) >= 20
    assert len(set(FAULTS.values())) >= 30


@pytest.mark.parametrize("fault", FAULTS)
def test_a_kind_of_fault_has_a_test_that_compares_the_scores(fault: str) -> None:
    module, function, parameter = named(FAULTS[fault])
    tests = [node for node in module.body if getattr(node, "name", "") == function]
    assert len(tests) == 1, FAULTS[fault]
    marks = [node.value for node in ast.walk(tests[0]) if isinstance(node, ast.Constant)]
    assert not parameter or parameter in marks
    assert calls(module, function) & COMPARES, f"{function} compares no scores"


def test_a_function_that_compares_nothing_would_be_found() -> None:
    module = ast.parse("def a():\n    b()\ndef b():\n    assert_same(1, 2)\ndef c():\n    c()\n")
    assert calls(module, "a") & COMPARES
    assert not calls(module, "c") & COMPARES


def test_the_documents_list_the_same_faults_and_tests() -> None:
    page = (ROOT / "docs" / "how_we_know.md").read_text()
    section = page.partition("\n## Faults\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| (.+?) \| `(.+?)` \|$", section, re.MULTILINE)
    assert {fault: test for fault, _, test in rows} == {
        fault: test.rpartition("/")[2] for fault, test in FAULTS.items()
    }
    assert all(words.strip() for _, words, _ in rows)
