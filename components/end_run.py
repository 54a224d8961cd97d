"""Component: end the tracker's run after a pipeline run has failed or was cancelled."""

from components.platform.stage import stage


@stage
def end_run(store: str) -> None:
    """End the tracker's run as failed or killed and record the cause, unless a step has already ended it.

    This step runs after all others, even after a cancellation. It logs its own errors but does not fail, because a
    failure would hide the pipeline run's error.

    Args:
        store: directory or s3://bucket/prefix that contains the steps' error messages.
    """
    import logging
    import os

    from components.platform import runtime, tracking
    from components.platform.stage_run import stage_run
    from infoxlm_core.errors import InfoXLMError

    if os.environ.get(runtime.DRIVER):  # the driver of a local run ends the tracker's run itself
        return
    with stage_run("end_run", store, reports_to_tracker=False):
        try:
            tracking.end_unfinished(store, runtime.find_final_status(store))
        except InfoXLMError as error:
            logging.warning("The tracker's run could not be ended: %s", error)
