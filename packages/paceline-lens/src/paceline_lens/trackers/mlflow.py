"""`MLflowTracker` writes numbers, figures and files to MLflow: a server, or a local database (`MLFLOW_TRACKING_URI`).

MLflow's client sends each value at once, and waits up to four minutes for a server that is down. So a `Delivery` sends the
values of `log`, by `address` and `send`. All other calls go to the client directly.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.base import env as environment
from paceline.base.errors import TrackerError
from paceline.base.log import warn_once
from paceline.observe.trackers.library import LibraryTracker
from paceline.observe.trackers.tracker import Status
from paceline_lens.trackers.delivery import Delivery, DeliveryEntry, RefusedError


class MLflowTracker(LibraryTracker):
    """Writes to MLflow; the run's name is the experiment.

    Variables win over options: MLFLOW_EXPERIMENT_NAME, MLFLOW_RUN_ID, MLFLOW_TAGS (JSON) and MLFLOW_NESTED_RUN.
    Options: `logging_dir` (where artifacts of a new experiment go), `run_id`, `tags`, `nested_run`, `run_name`,
    `description`.
    """

    name = "mlflow"
    requires = ("mlflow",)
    package = "mlflow"
    without_server = "start the server, or keep the numbers in a file: MLFLOW_TRACKING_URI=sqlite:///mlflow.db"

    def __init__(self, folder: str | Path = ".", **options: object) -> None:
        super().__init__(folder, **options)
        self._run_folder = self.folder
        self._delivery: Delivery | None = None  # begins with the first value

    def open_run(self, run: str) -> Any:
        """Begins a run of an experiment, which is created if there is none of this name."""
        import mlflow

        self._run_folder = self.folder / run
        env = environment.snapshot()
        _knock(env.get("MLFLOW_TRACKING_URI", ""))  # the client would try for four minutes
        options = self.options
        tags = json.loads(env["MLFLOW_TAGS"]) if env.get("MLFLOW_TAGS") else options.get("tags")
        name = env.get("MLFLOW_EXPERIMENT_NAME") or run
        # MLflow's filters have no escape for a quotation mark, but accept either kind of mark around a value.
        quote = '"' if "'" in name else "'"
        experiments = mlflow.search_experiments(filter_string=f"name = {quote}{name}{quote}")
        if experiments:
            experiment = experiments[0].experiment_id
        else:
            experiment = mlflow.create_experiment(name=name, artifact_location=options.get("logging_dir"), tags=tags)
        is_nested = environment.parse_bool(env.get("MLFLOW_NESTED_RUN", "")) or options.get("nested_run", False)
        return mlflow.start_run(
            run_id=env.get("MLFLOW_RUN_ID") or options.get("run_id"),
            experiment_id=experiment,
            run_name=options.get("run_name"),
            nested=is_nested,
            tags=tags,
            description=options.get("description"),
        )

    def store_config(self, values: Mapping[str, Any]) -> None:
        """Stores the settings; one whose text is longer than MLflow takes is left out, with a warning."""
        import mlflow
        from mlflow.utils.validation import MAX_PARAM_VAL_LENGTH, MAX_PARAMS_TAGS_PER_BATCH

        fitting = []
        for name, value in self._new_settings(values).items():
            length = len(str(value))
            if length <= MAX_PARAM_VAL_LENGTH:
                fitting.append((name, value))
            else:
                why = f"MLflow takes at most {MAX_PARAM_VAL_LENGTH} characters"
                warn_once("observe", f"the setting {name} has {length} characters, and is left out: {why}.")
        for start in range(0, len(fitting), MAX_PARAMS_TAGS_PER_BATCH):
            mlflow.log_params(dict(fitting[start : start + MAX_PARAMS_TAGS_PER_BATCH]))

    def _new_settings(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the settings that a continued run has not stored yet; MLflow refuses to change a stored one."""
        if self._earlier_run is None:
            return values
        from mlflow.tracking import MlflowClient

        stored = MlflowClient().get_run(self.run_id()).data.params
        changed = sorted(name for name, value in values.items() if stored.get(name, str(value)) != str(value))
        if changed:
            warn_once(
                "observe", f"MLflow keeps the settings of the run's first start: {', '.join(changed)} differ now."
            )
        return {name: value for name, value in values.items() if name not in stored}

    def log(self, values: Mapping[str, Any], step: int | None = None, **options: object) -> None:
        """Hands numbers to the thread that sends them; `options` of MLflow's own call send them at once."""
        if options:
            self.log_at_once(values, step, **options)
            return
        if self._delivery is None:
            self._delivery = Delivery(self, self._run_folder)
        self._delivery.put(values, step)

    def log_at_once(self, values: Mapping[str, Any], step: int | None = None, **options: object) -> None:
        """Sends numbers, and returns when the server has them; `options` are those of `mlflow.log_metrics`."""
        import mlflow

        mlflow.log_metrics(self.numbers_of(values), step=step, **options)

    def log_figure(self, figure: object, artifact_file: str, **options: object) -> None:
        """Saves a figure among the run's artifacts."""
        import mlflow

        mlflow.log_figure(figure=figure, artifact_file=artifact_file, **options)

    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """Saves a file among the run's artifacts."""
        import mlflow

        mlflow.log_artifact(local_path=local_path, artifact_path=artifact_path)

    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        """Saves what lies in a folder among the run's artifacts."""
        import mlflow

        mlflow.log_artifacts(local_dir=local_dir, artifact_path=artifact_path)

    def run_id(self) -> str | None:
        """Returns the id of the run."""
        return str(self.native.info.run_id)

    @staticmethod
    def resume_options(run_id: str) -> Mapping[str, Any]:
        """Returns the option that continues a run."""
        return {"run_id": run_id}

    def address(self) -> dict[str, Any]:
        """Returns the id of the run and the address of its server."""
        import mlflow

        return {"id": self.run_id(), "uri": mlflow.get_tracking_uri()}

    @staticmethod
    def send(address: Mapping[str, Any], entries: Sequence[DeliveryEntry]) -> None:
        """Sends values with the times at which they were logged; MLflow stores equal ones once."""
        from mlflow.entities import Metric
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        _knock(address["uri"])
        client = MlflowClient(tracking_uri=address["uri"])
        metrics: list[Metric] = []
        for entry in entries:
            time_ms = round(entry.t * 1000)
            metrics += [Metric(name, value, time_ms, entry.step or 0) for name, value in entry.values.items()]
        endings = [entry.status for entry in entries if entry.status]
        try:
            if metrics:
                client.log_batch(address["id"], metrics=metrics)
            for ending in endings:
                client.set_terminated(address["id"], "FINISHED" if ending == "finished" else "FAILED")
        except MlflowException as error:
            if error.error_code in _REFUSALS:
                raise RefusedError(str(error)) from error
            raise

    def close_run(self, status: Status) -> None:
        """Ends the run, after an error as a failed one, when all values are sent.

        Raises:
            TrackerError: `tracker-unsent`, `tracker-refused`.
        """
        import mlflow

        problem = None
        if self._delivery is not None:
            timeout_s = environment.get("PACELINE_TRACKER_FLUSH_S")
            if status == "failed":
                # The other processes wait for this one, which has failed, and only learn of the error when it ends.
                timeout_s = min(timeout_s, _FLUSH_AFTER_AN_ERROR_S)
            problem = self._delivery.finish(status, timeout_s)
            self._delivery = None
        if problem is not None and problem.code == "tracker-unsent":
            # Otherwise the client would wait for the server again when the interpreter exits.
            impatient = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": "2"}
            with environment.patched(impatient), contextlib.suppress(mlflow.MlflowException):
                mlflow.end_run()
        elif status == "finished":
            mlflow.end_run()
        else:
            mlflow.end_run(status="FAILED")
        if problem is not None:
            raise TrackerError.of([problem])


def _knock(address: str) -> None:
    """Raises within 5 s if no server answers at an address, with any status; an address that is no URL of HTTP is skipped."""
    if address.startswith(("http://", "https://")):
        import requests

        requests.head(address, timeout=5)


_FLUSH_AFTER_AN_ERROR_S = 5.0
# The codes of errors for names and values that MLflow does not accept, and for a run that was deleted.
_REFUSALS = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST", "RESOURCE_DOES_NOT_EXIST")


TRACKER = MLflowTracker
