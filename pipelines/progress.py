"""Describe the progress of a run on Kubeflow in a line for each step that starts, ends or is retried.

Kubeflow's API lists every node of the Argo workflow, such as drivers, groups and attempts, without the id of the node.
But a node lists the ids of its children, and Argo computes the id of a node from its path. Therefore, the ids of the
children identify the step, and the iteration of a loop, to which a node belongs.
"""

from collections.abc import Iterator, Mapping, Sequence
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


def find_steps(spec: Mapping[str, Any], workflow: str, iterations: Sequence[str]) -> Iterator[Step]:
    """Yield all steps of a compiled pipeline. A step in a loop is yielded for each iteration.

    Args:
        spec: specification of the compiled pipeline.
        workflow: name of the Argo workflow.
        iterations: names of the first iterations of the loop; further iterations are named by their number.
    """
    iteration_names = list(iterations)
    for number in range(len(iterations) + 1, MAX_LOOP_STEPS + 1):
        iteration_names.append(f"iteration {number}")

    def find_in_group(group: Mapping[str, Any], group_path: str, iteration: str = "") -> Iterator[Step]:
        """Yield the steps of a group of tasks: of the pipeline, of the body of a loop, or of an exit handler."""
        for name, task in group["dag"]["tasks"].items():
            component = spec["components"][task["componentRef"]["name"]]
            path = f"{group_path}.{name}"
            if "triggerPolicy" in task:  # Argo runs an exit handler as a hook of the group before it
                path = f"{group_path}.{task['dependentTasks'][0]}.onExit.{name}"
            if "dag" not in component:
                label = task["taskInfo"]["name"]
                yield Step(name, f"{label} ({iteration})" if iteration else label, path)
            elif "parameterIterator" in task:
                for index, iteration_name in enumerate(iteration_names):
                    iteration_path = f"{path}.iteration-iterations({index}:{index}).iteration-item"
                    yield from find_in_group(component, iteration_path, iteration_name)
            else:
                yield from find_in_group(component, path, iteration)

    return find_in_group(spec["root"], f"{workflow}.root")


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
        for step in find_steps(spec, workflow="", iterations=()):
            self._labels_by_name[step.name] = step.label.partition(" (iteration")[0]
        self._labels_by_child: dict[str, str] = {}  # by the id of the executor node, and of its first attempt
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
            if not label:
                continue
            if task.display_name == _EXECUTOR:
                line = self._describe_retry(task, label)
            elif task.display_name in self._labels_by_name:
                line = self._describe_state(task, label)
            else:
                continue
            if line:
                lines.append(line)
        return lines

    def _describe_retry(self, executor: Any, label: str) -> str:
        """Return a line if a step has a new attempt, else an empty text."""
        num_attempts = len(executor.child_tasks or ())
        if num_attempts <= self._num_attempts.get(label, 1):
            return ""
        self._num_attempts[label] = num_attempts
        return f"{label}: retried, attempt {num_attempts}"

    def _describe_state(self, task: Any, label: str) -> str:
        """Return a line if the state of a step has changed to one that users know, else an empty text."""
        if self._states.get(task.task_id) == task.state:
            return ""
        self._states[task.task_id] = task.state
        if task.state == "RUNNING":
            self._running_labels.add(label)
        else:
            self._running_labels.discard(label)
        return f"{label}: {_MESSAGES[task.state]}" if task.state in _MESSAGES else ""

    def describe_pending(self, tasks: Sequence[Any], current_time: float) -> list[str]:
        """Return a line if a pod has been pending for another five minutes since the last line.

        The line names all running steps, because Kubeflow's API does not tell to which step a pod belongs.

        Args:
            tasks: `run_details.task_details` of the run.
            current_time: seconds of a monotonic clock.
        """
        pending_ids = [task.task_id for task in tasks if task.state == "PENDING"]
        self._pending_since = {task_id: self._pending_since.get(task_id, current_time) for task_id in pending_ids}
        first_pending_time = min(self._pending_since.values(), default=current_time)
        minutes = int(current_time - first_pending_time) // 60
        num_reminders = minutes // _MINUTES_BETWEEN_REMINDERS
        is_reminder_due = num_reminders > self._num_reminders
        self._num_reminders = num_reminders
        if not is_reminder_due:
            return []
        steps = ", ".join(sorted(self._running_labels)) or "run"
        return [f"{steps}: a pod is still pending after {minutes} min: {_PENDING_ADVICE}"]

    def _find_label(self, task: Any) -> str:
        """Return the label of the step to which a node belongs, or an empty text."""
        child_ids = [child.pod_name for child in task.child_tasks or ()]
        if child_ids and not self._labels_by_child:
            self._read_labels(child_ids[0])
        for child_id in child_ids:
            if child_id in self._labels_by_child:
                return self._labels_by_child[child_id]
        if not child_ids and task.state == "RUNNING":  # a step that has just started may have no children yet
            return ""
        return self._labels_by_name.get(task.display_name, "")

    def _read_labels(self, node: str) -> None:
        """Compute the ids of the executor node and of the first attempt of each step. Any node names the workflow."""
        workflow, _, _ = node.rpartition("-")
        for step in find_steps(self._spec, workflow, self._iterations):
            executor_path = f"{step.path}.{_EXECUTOR}"
            self._labels_by_child[compute_node_id(workflow, executor_path)] = step.label
            self._labels_by_child[compute_node_id(workflow, f"{executor_path}(0)")] = step.label
