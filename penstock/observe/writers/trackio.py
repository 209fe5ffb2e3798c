"""trackio, a local tracker with wandb's interface."""


class TrackioWriter:
    name = "trackio"

    def __init__(self, project: str, name: str) -> None:
        import trackio

        self._trackio = trackio
        trackio.init(project=project, name=name)

    def write(self, step: int, metrics: dict[str, float]) -> None:
        self._trackio.log(metrics, step=step)

    def close(self) -> None:
        self._trackio.finish()
