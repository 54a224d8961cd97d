"""Report the progress of a Kubeflow run: one line for each step that starts, ends or is retried.

Kubeflow's API lists every node of the Argo workflow, such as drivers, groups and attempts, but omits the node's own id.
A node does list its children's ids, and Argo computes a node's id from its path. The children's ids therefore identify
the node's step and loop iteration.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from components.platform.parameters import MAX_LOOP_STEPS

_EXECUTOR = "executor"  # Kubeflow's name for the node whose children are the attempts of a step
_MINUTES_BETWEEN_REMINDERS = 5  # longer than pulling a large image usually takes
_PENDING_ADVICE = "image, quota or Pod Security? kubectl get events --field-selector type=Warning"
_MESSAGES = {"RUNNING": "started", "SUCCEEDED": "succeeded", "FAILED": "failed"}


class Step(NamedTuple):
    """A pipeline step. In a loop, each iteration has its own steps."""

    name: str
    """Name of the step's Argo nodes."""
    label: str
    """Name shown to users."""
    path: str
    """Path of the step's Argo node, beginning with the workflow's name."""


def compute_node_id(workflow: str, path: str) -> str:
    """Compute the id of the node at a path as Argo does: the workflow's name and an FNV-1a hash."""
    fnv_hash = 0x811C9DC5  # offset basis of the 32-bit hash
    for byte in path.encode():
        fnv_hash = ((fnv_hash ^ byte) * 0x01000193) & 0xFFFFFFFF  # FNV prime, and overflow of 32 bits
    return f"{workflow}-{fnv_hash}"


def list_steps(spec: Mapping[str, Any], workflow: str, iterations: Sequence[str]) -> list[Step]:
    """Return all steps of a compiled pipeline. Repeat the steps of a loop for each iteration.

    Args:
        spec: specification of the compiled pipeline.
        workflow: name of the Argo workflow.
        iterations: names of the loop's iterations. Further iterations are named by their numbers.
    """
    # A step computes the loop's items during the run, so list as many iterations as a loop can have.
    iteration_numbers = range(len(iterations) + 1, MAX_LOOP_STEPS + 1)
    iteration_names = [*iterations, *(f"iteration {number}" for number in iteration_numbers)]
    return _list_steps_of_dag(spec, spec["root"]["dag"], f"{workflow}.root", iteration_names)


def _list_steps_of_dag(
    spec: Mapping[str, Any], dag: Mapping[str, Any], dag_path: str, iteration_names: list[str], iteration: str = ""
) -> list[Step]:
    """Return the steps of a DAG: the whole pipeline, the body of a loop, or the body of an exit handler.

    Args:
        spec: specification of the compiled pipeline.
        dag: the DAG.
        dag_path: path of the DAG's Argo node.
        iteration_names: names of the iterations of the DAG's loops.
        iteration: name of the iteration if the DAG is a loop body.
    """
    steps = []
    for name, task in dag["tasks"].items():
        component = spec["components"][task["componentRef"]["name"]]
        path = f"{dag_path}.{name}"
        if "triggerPolicy" in task:  # Argo runs an exit handler as a hook of the previous task
            previous_task = task["dependentTasks"][0]
            path = f"{dag_path}.{previous_task}.onExit.{name}"
        if "dag" not in component:
            label = task["taskInfo"]["name"]
            if iteration:
                label = f"{label} ({iteration})"
            steps.append(Step(name, label, path))
        elif "parameterIterator" in task:  # a loop
            for index, iteration_name in enumerate(iteration_names):
                # The last two parts are the names of an iteration's two Argo nodes.
                iteration_path = f"{path}.iteration-iterations({index}:{index}).iteration-item"
                steps += _list_steps_of_dag(spec, component["dag"], iteration_path, iteration_names, iteration_name)
        else:
            steps += _list_steps_of_dag(spec, component["dag"], path, iteration_names, iteration)
    return steps


class Progress:
    """Describes the changes of a run since the last call.

    Args:
        spec: specification of the compiled pipeline.
        iterations: names of the loop's iterations.
    """

    def __init__(self, spec: Mapping[str, Any], iterations: Sequence[str] = ()) -> None:
        self._spec = spec
        self._iterations = iterations
        # These labels omit the iteration, which is unknown until the step's node has children.
        steps = list_steps(spec, workflow="", iterations=())
        self._labels_by_name = {step.name: step.label.partition(" (iteration")[0] for step in steps}
        self._labels_by_node_id: dict[str, str] = {}  # for executor nodes and their first attempts
        self._states: dict[str, str] = {}  # by task id
        self._num_attempts: dict[str, int] = {}  # by label
        self._running_labels: set[str] = set()
        self._pending_since: dict[str, float] = {}  # by task id
        self._num_reminders = 0

    def describe_changes(self, tasks: Sequence[Any]) -> list[str]:
        """Return one line for each step that has started, ended or been retried since the last call.

        Args:
            tasks: the run's `run_details.task_details`.
        """
        lines = []
        for task in tasks:
            label = self._find_label(task)
            line = ""
            # A step's executor node lists the attempts. The node with the step's name has the state.
            if label and task.display_name == _EXECUTOR:
                line = self._update_attempts(task, label)
            elif label and task.display_name in self._labels_by_name:
                line = self._update_state(task, label)
            if line:
                lines.append(line)
        return lines

    def _update_attempts(self, executor: Any, label: str) -> str:
        """Record a step's number of attempts. Return a line about a new attempt, or "" if there is none."""
        num_attempts = len(executor.child_tasks or ())
        if num_attempts <= self._num_attempts.get(label, 1):  # the first attempt is not a retry
            return ""
        self._num_attempts[label] = num_attempts
        return f"{label}: retried, attempt {num_attempts}"

    def _update_state(self, task: Any, label: str) -> str:
        """Record a step's state. Return a line if the step has started or ended, else ""."""
        if self._states.get(task.task_id) == task.state:
            return ""
        self._states[task.task_id] = task.state
        if task.state == "RUNNING":
            self._running_labels.add(label)
        else:
            self._running_labels.discard(label)
        return f"{label}: {_MESSAGES[task.state]}" if task.state in _MESSAGES else ""

    def describe_pending(self, tasks: Sequence[Any], current_time: float) -> list[str]:
        """Return one line every five minutes while a pod is pending, else an empty list.

        The line names all running steps, because Kubeflow's API does not report a pod's step.

        Args:
            tasks: the run's `run_details.task_details`.
            current_time: monotonic time in seconds.
        """
        # Tasks that have started are dropped, because only pods that still wait need a reminder.
        pending_ids = [task.task_id for task in tasks if task.state == "PENDING"]
        self._pending_since = {task_id: self._pending_since.get(task_id, current_time) for task_id in pending_ids}
        longest_pending_seconds = current_time - min(self._pending_since.values(), default=current_time)
        minutes = int(longest_pending_seconds) // 60

        previous_reminders = self._num_reminders
        self._num_reminders = minutes // _MINUTES_BETWEEN_REMINDERS
        if self._num_reminders <= previous_reminders:
            return []
        running_steps = ", ".join(sorted(self._running_labels)) or "run"
        return [f"{running_steps}: a pod is still pending after {minutes} min: {_PENDING_ADVICE}"]

    def _find_label(self, task: Any) -> str:
        """Return the label of an Argo node's step, or "" if the step is unknown.

        Args:
            task: element of `run_details.task_details` that describes the node and lists its children.
        """
        child_ids = [child.pod_name for child in task.child_tasks or ()]
        if child_ids and not self._labels_by_node_id:
            workflow, _, _ = child_ids[0].rpartition("-")  # a node id begins with the workflow's name
            self._compute_node_ids(workflow)
        for child_id in child_ids:
            if child_id in self._labels_by_node_id:
                return self._labels_by_node_id[child_id]
        if not child_ids and task.state == "RUNNING":  # wait for the first child, which tells the loop iteration
            return ""
        return self._labels_by_name.get(task.display_name, "")

    def _compute_node_ids(self, workflow: str) -> None:
        """Compute the ids of each step's executor node and of the first attempt below this node."""
        for step in list_steps(self._spec, workflow, self._iterations):
            # A step node lists its executor as a child, and an executor lists its attempts.
            executor_path = f"{step.path}.{_EXECUTOR}"
            self._labels_by_node_id[compute_node_id(workflow, executor_path)] = step.label
            self._labels_by_node_id[compute_node_id(workflow, f"{executor_path}(0)")] = step.label
