"""Numbers, figures and files for MLflow, on a server or in files (`MLFLOW_TRACKING_URI`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from paceline.base import env as environment
from paceline.base.log import warn_once
from paceline.observe.trackers.library import LibraryTracker
from paceline.observe.trackers.tracker import Status


class MLflowTracker(LibraryTracker):
    """Writes to MLflow; the run's name is the experiment.

    Variables win over options: MLFLOW_EXPERIMENT_NAME, MLFLOW_RUN_ID, MLFLOW_TAGS (JSON) and MLFLOW_NESTED_RUN.
    Options: `logging_dir` (where artifacts of a new experiment go), `run_id`, `tags`, `nested_run`, `run_name`,
    `description`.
    """

    name = "mlflow"
    requires = ("mlflow",)
    package = "mlflow"

    def open_run(self, run: str) -> Any:
        """Begins a run of an experiment, which is made where it is not there yet."""
        import mlflow

        env = environment.snapshot()
        options = self.options
        tags = json.loads(env["MLFLOW_TAGS"]) if env.get("MLFLOW_TAGS") else options.get("tags")
        name = env.get("MLFLOW_EXPERIMENT_NAME") or run
        experiments = mlflow.search_experiments(filter_string=f"name = '{name}'")
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
        for name, value in values.items():
            if len(str(value)) <= MAX_PARAM_VAL_LENGTH:
                fitting.append((name, value))
            else:
                why = f"MLflow takes at most {MAX_PARAM_VAL_LENGTH} characters"
                warn_once("observe", f"the setting {name} has {len(str(value))} characters, and is left out: {why}.")
        for start in range(0, len(fitting), MAX_PARAMS_TAGS_PER_BATCH):
            mlflow.log_params(dict(fitting[start : start + MAX_PARAMS_TAGS_PER_BATCH]))

    def log(self, values: Mapping[str, Any], step: int | None = None, **options: object) -> None:
        """Writes numbers."""
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

    def close_run(self, status: Status) -> None:
        """Ends the run; after an error as a failed one."""
        import mlflow

        if status == "finished":
            mlflow.end_run()
        else:
            mlflow.end_run(status="FAILED")


TRACKER = MLflowTracker
