"""Describe the progress of a run on Kubeflow in a line for each step that starts, ends or is retried.

Kubeflow's API lists every node of the Argo workflow, such as drivers, groups and attempts, without the id of the node.
But a node lists the ids of its children, and Argo computes the id of a node from its path. Therefore, the ids of the
children identify the step, and the iteration of a loop, to which a node belongs.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from components.platform.parameters import MAX_LOOP_STEPS

_EXECUTOR = "executor"  # Kubeflow's name of the node whose children are the attempts of a step
_MINUTES_BETWEEN_REMINDERS = 5  # pulling a large image takes a few minutes, which is no reason for a message
_PENDING_ADVICE = "image, quota or Pod Security? kubectl get events --field-selector type=Warning"
_MESSAGES = {"RUNNING": "started", "SUCCEEDED": "succeeded", "FAILED": "failed"}


class Step(NamedTuple):
    """A step of a pipeline, or of an iteration of its loop."""

    name: str
    """Name of its Argo nodes."""
    label: str
    """Name that users read."""
    path: str
    """Path of its Argo node, which begins with the name of the workflow."""


def compute_node_id(workflow: str, path: str) -> str:
    """Return the id that Argo computes for the node at a path: the name of the workflow and an FNV-1a hash."""
    fnv_hash = 0x811C9DC5
    for byte in path.encode():
        fnv_hash = ((fnv_hash ^ byte) * 0x01000193) & 0xFFFFFFFF
    return f"{workflow}-{fnv_hash}"


def list_steps(spec: Mapping[str, Any], workflow: str, iterations: Sequence[str]) -> list[Step]:
    """Return all steps of a compiled pipeline. A step in a loop is returned once per iteration.

    Args:
        spec: specification of the compiled pipeline.
        workflow: name of the Argo workflow.
        iterations: names of the iterations of the loop. The number of an iteration replaces a missing name.
    """
    iteration_names = list(iterations)
    for number in range(len(iterations) + 1, MAX_LOOP_STEPS + 1):
        iteration_names.append(f"iteration {number}")
    return _list_steps_of_dag(spec, spec["root"]["dag"], f"{workflow}.root", iteration_names)


def _list_steps_of_dag(
    spec: Mapping[str, Any], dag: Mapping[str, Any], dag_path: str, iteration_names: list[str], iteration: str = ""
) -> list[Step]:
    """Return the steps of a DAG, which is the pipeline itself, the body of a loop, or the body of an exit handler.

    Args:
        spec: specification of the compiled pipeline.
        dag: the DAG.
        dag_path: path of its Argo node.
        iteration_names: names of the iterations of each loop in the DAG.
        iteration: name of the iteration if the DAG is the body of a loop.
    """
    steps = []
    for name, task in dag["tasks"].items():
        component = spec["components"][task["componentRef"]["name"]]
        path = f"{dag_path}.{name}"
        if "triggerPolicy" in task:  # an exit handler, which Argo runs as a hook of the task before it
            previous_task = task["dependentTasks"][0]
            path = f"{dag_path}.{previous_task}.onExit.{name}"
        if "dag" not in component:
            label = task["taskInfo"]["name"]
            if iteration:
                label = f"{label} ({iteration})"
            steps.append(Step(name, label, path))
        elif "parameterIterator" in task:
            for index, iteration_name in enumerate(iteration_names):
                iteration_path = f"{path}.iteration-iterations({index}:{index}).iteration-item"
                steps += _list_steps_of_dag(spec, component["dag"], iteration_path, iteration_names, iteration_name)
        else:
            steps += _list_steps_of_dag(spec, component["dag"], path, iteration_names, iteration)
    return steps


class Progress:
    """Describes what has changed in a run since the last call.

    Args:
        spec: specification of the compiled pipeline.
        iterations: names of the iterations of its loop.
    """

    def __init__(self, spec: Mapping[str, Any], iterations: Sequence[str] = ()) -> None:
        self._spec = spec
        self._iterations = iterations
        # Labels by the name of the step, without the iteration, which is unknown until the node of a step has children.
        self._labels_by_name: dict[str, str] = {}
        for step in list_steps(spec, workflow="", iterations=()):
            self._labels_by_name[step.name] = step.label.partition(" (iteration")[0]
        self._labels_by_node_id: dict[str, str] = {}  # of the executor node, and of its first attempt
        self._states: dict[str, str] = {}  # by the id of the task
        self._num_attempts: dict[str, int] = {}  # by label
        self._running_labels: set[str] = set()
        self._pending_since: dict[str, float] = {}  # by the id of the task
        self._num_reminders = 0

    def describe_changes(self, tasks: Sequence[Any]) -> list[str]:
        """Return a line for each step that has started, ended or been retried since the last call.

        Args:
            tasks: `run_details.task_details` of the run.
        """
        lines = []
        for task in tasks:
            label = self._find_label(task)
            line = ""
            if label and task.display_name == _EXECUTOR:
                line = self._update_attempts(task, label)
            elif label and task.display_name in self._labels_by_name:
                line = self._update_state(task, label)
            if line:
                lines.append(line)
        return lines

    def _update_attempts(self, executor: Any, label: str) -> str:
        """Remember the number of attempts of a step. Return a line if there is a new one, else an empty text."""
        num_attempts = len(executor.child_tasks or ())
        if num_attempts <= self._num_attempts.get(label, 1):
            return ""
        self._num_attempts[label] = num_attempts
        return f"{label}: retried, attempt {num_attempts}"

    def _update_state(self, task: Any, label: str) -> str:
        """Remember the state of a step. Return a line if the step has started or ended, else an empty text."""
        if self._states.get(task.task_id) == task.state:
            return ""
        self._states[task.task_id] = task.state
        if task.state == "RUNNING":
            self._running_labels.add(label)
        else:
            self._running_labels.discard(label)
        return f"{label}: {_MESSAGES[task.state]}" if task.state in _MESSAGES else ""

    def describe_pending(self, tasks: Sequence[Any], current_time: float) -> list[str]:
        """Return a line every five minutes while a pod is pending.

        The line names all running steps, because Kubeflow's API does not tell to which step a pod belongs.

        Args:
            tasks: `run_details.task_details` of the run.
            current_time: seconds of a monotonic clock.
        """
        pending_since = {}
        for task in tasks:
            if task.state == "PENDING":
                pending_since[task.task_id] = self._pending_since.get(task.task_id, current_time)
        self._pending_since = pending_since
        longest_pending_seconds = current_time - min(pending_since.values(), default=current_time)
        minutes = int(longest_pending_seconds) // 60

        previous_reminders = self._num_reminders
        self._num_reminders = minutes // _MINUTES_BETWEEN_REMINDERS
        if self._num_reminders <= previous_reminders:
            return []
        running_steps = ", ".join(sorted(self._running_labels)) or "run"
        return [f"{running_steps}: a pod is still pending after {minutes} min: {_PENDING_ADVICE}"]

    def _find_label(self, task: Any) -> str:
        """Return the label of the step to which an Argo node belongs, or an empty text if it is unknown.

        Args:
            task: an element of `run_details.task_details`, which describes an Argo node and lists its children.
        """
        child_ids = [child.pod_name for child in task.child_tasks or ()]
        if child_ids and not self._labels_by_node_id:
            workflow, _, _ = child_ids[0].rpartition("-")  # the id of a node begins with the name of its workflow
            self._compute_node_ids(workflow)
        for child_id in child_ids:
            if child_id in self._labels_by_node_id:
                return self._labels_by_node_id[child_id]
        if not child_ids and task.state == "RUNNING":  # a step that has just started may have no children yet
            return ""
        return self._labels_by_name.get(task.display_name, "")

    def _compute_node_ids(self, workflow: str) -> None:
        """Compute the ids of the nodes that identify a step: its executor node, and the first attempt below it."""
        for step in list_steps(self._spec, workflow, self._iterations):
            executor_path = f"{step.path}.{_EXECUTOR}"
            self._labels_by_node_id[compute_node_id(workflow, executor_path)] = step.label
            self._labels_by_node_id[compute_node_id(workflow, f"{executor_path}(0)")] = step.label
