"""How we start a Java server: small, and quick to its first answer."""

from pathlib import Path

from tests.servers.tools import JAVA, path_of

# The first compiler only and the simplest collector: on two cores a server that lives for minutes
# is up sooner and also serves faster than one whose optimising compiler competes with the tests.
LEAN = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData")


def java(
    *arguments: str, heap_mb: int, classpath: tuple[Path, ...], options: tuple[str, ...] = ()
) -> list[str]:
    """The command that runs a main class with its arguments.

    A folder on the class path stands for all jars in it and for itself.
    """
    entries = [entry for folder in classpath for entry in (str(folder), f"{folder}/*")]
    return [
        path_of(JAVA),
        f"-Xmx{heap_mb}m",
        *LEAN,
        *options,
        "-cp",
        ":".join(entries),
        *arguments,
    ]
