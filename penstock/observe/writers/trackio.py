"""trackio, a local tracker with wandb's interface."""

from penstock.errors import MissingExtraError


class TrackioWriter:
    def __init__(self, project: str, name: str) -> None:
        try:
            import trackio
        except ImportError as error:
            raise MissingExtraError(
                "observe.trackio needs trackio: pip install 'penstock[trackio]'"
            ) from error
        self._trackio = trackio
        trackio.init(project=project, name=name)

    def write(self, step: int, metrics: dict[str, float]) -> None:
        self._trackio.log(metrics, step=step)

    def close(self) -> None:
        self._trackio.finish()
