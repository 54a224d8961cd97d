"""The progress of a run on Kubeflow is described from the nodes of its Argo workflow."""

import kfp_server_api
import pytest

from pipelines.progress import Progress, compute_node_id
from pipelines.submit import read_compiled
from tests.pipelines.kubeflow_server import list_tasks

GROUP = "root.exit-handler-1"


def describe(progress: Progress, states: dict[str, str]) -> list[str]:
    """Return the lines that report nodes in these states, which are given by path."""
    tasks = []
    for task in list_tasks(states):
        children = [kfp_server_api.PipelineTaskDetailChildTask(**child) for child in task.pop("child_tasks")]
        tasks.append(kfp_server_api.V2beta1PipelineTaskDetail(**task, child_tasks=children))
    return progress.describe_changes(tasks)


def nodes_of_step(path: str, state: str, attempts: int = 1) -> dict[str, str]:
    """Return the nodes of a step: its driver, its group, the executor and the attempts of the executor."""
    executor = f"{path}.executor"
    pods = {f"{executor}({number})": "FAILED" for number in range(attempts - 1)}
    pods[f"{executor}({attempts - 1})"] = state
    return {f"{path}-driver(0)": "SUCCEEDED", path: state, executor: state, **pods}


def outer_nodes() -> dict[str, str]:
    """Return the nodes that belong to no step."""
    groups = ("", "root", GROUP, f"{GROUP}.for-loop-2")
    drivers = ("root-driver(0)", f"{GROUP}-driver", f"{GROUP}.for-loop-2.iteration-driver(0)")
    return dict.fromkeys(groups, "RUNNING") | dict.fromkeys(drivers, "SUCCEEDED")


def test_node_id_is_that_of_argo():
    assert compute_node_id("dag-diamond-xfww2", "dag-diamond-xfww2.A(0)") == "dag-diamond-xfww2-990947287"


def test_step_is_reported_when_it_starts_ends_or_is_retried():
    progress = Progress(read_compiled("infoxlm")[0])
    prepare, pretrain = f"{GROUP}.prepare-corpus", f"{GROUP}.pretrain"

    started = outer_nodes() | nodes_of_step(prepare, "RUNNING")
    retried = outer_nodes() | nodes_of_step(prepare, "RUNNING", attempts=2)
    next_step = outer_nodes() | nodes_of_step(prepare, "SUCCEEDED", attempts=2) | nodes_of_step(pretrain, "RUNNING")
    failed = next_step | nodes_of_step(pretrain, "FAILED")
    ended = failed | nodes_of_step(f"{GROUP}.onExit.end-run", "SUCCEEDED")

    assert describe(progress, outer_nodes()) == []
    assert describe(progress, started) == ["prepare the text: started"]
    assert describe(progress, started) == []
    assert describe(progress, retried) == ["prepare the text: retried, attempt 2"]
    assert describe(progress, next_step) == ["prepare the text: succeeded", "pre-train the encoder: started"]
    assert describe(progress, failed) == ["pre-train the encoder: failed"]
    assert describe(progress, ended) == ["end the run: succeeded"]


def test_each_iteration_of_a_loop_is_reported_by_its_name():
    progress = Progress(read_compiled("ablations")[0], ["full seed 1", "MLM seed 1"])
    first, second, third = [
        f"{GROUP}.for-loop-2.iteration-iterations({number}:{number}).iteration-item" for number in range(3)
    ]

    states = outer_nodes() | nodes_of_step(f"{first}.pretrain", "RUNNING")
    assert describe(progress, states) == ["pre-train a variant (full seed 1): started"]
    states |= nodes_of_step(f"{second}.pretrain", "RUNNING") | nodes_of_step(f"{first}.pretrain", "RUNNING", 2)
    assert sorted(describe(progress, states)) == [
        "pre-train a variant (MLM seed 1): started",
        "pre-train a variant (full seed 1): retried, attempt 2",
    ]
    states |= nodes_of_step(f"{second}.pretrain", "SUCCEEDED") | nodes_of_step(f"{third}.finetune", "RUNNING")
    assert sorted(describe(progress, states)) == [
        "fine-tune a variant (iteration 3): started",
        "pre-train a variant (MLM seed 1): succeeded",
    ]


@pytest.mark.parametrize("path", ["unknown-group.prepare-corpus", "another-root.prepare-corpus"])
def test_step_with_an_unexpected_path_is_reported(path):
    progress = Progress(read_compiled("infoxlm")[0])

    assert describe(progress, nodes_of_step(path, "RUNNING")) == ["prepare the text: started"]


def test_pending_pod_is_reported_every_five_minutes_with_the_running_steps():
    progress = Progress(read_compiled("infoxlm")[0])
    describe(progress, nodes_of_step(f"{GROUP}.pretrain", "RUNNING"))
    pod = kfp_server_api.V2beta1PipelineTaskDetail(task_id="1", display_name="executor(0)", state="PENDING")

    lines = [line for minute in range(12) for line in progress.describe_pending([pod], 60.0 * minute)]

    assert [line.partition(": image")[0] for line in lines] == [
        "pre-train the encoder: a pod is still pending after 5 min",
        "pre-train the encoder: a pod is still pending after 10 min",
    ]
    assert progress.describe_pending([], 900.0) == []
