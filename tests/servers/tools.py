"""The programs that a developer must have installed, and how we say that one is missing."""

import functools
import os
import re
import shutil
import subprocess
from dataclasses import dataclass

from tests.servers.base import ServerError

JAVA_MAJOR_MIN = 17


class MissingToolError(ServerError):
    """A program is not installed, or too old."""


@dataclass(frozen=True)
class Tool:
    """A program on PATH, and what to install when it is not there."""

    command: str
    remedy: str


JAVA = Tool("java", f"install a JDK {JAVA_MAJOR_MIN} or later")
JAVAC = Tool("javac", f"install a JDK {JAVA_MAJOR_MIN} or later, a JRE is not enough")
MAVEN = Tool("mvn", "install Maven 3.8 or later")
GO = Tool("go", "install Go 1.25 or later")
NPM = Tool("npm", "install Node.js 18 or later")


def find(tool: Tool) -> str | None:
    """The program's path, from JAVA_HOME first, as Maven and Spark look for theirs."""
    folders = [os.environ.get("PATH", os.defpath)]
    if java_home := os.environ.get("JAVA_HOME"):
        folders.insert(0, os.path.join(java_home, "bin"))
    return shutil.which(tool.command, path=os.pathsep.join(folders))


def problem(tool: Tool) -> str | None:
    """What is wrong with the tool and what to do, in one line; None when nothing is."""
    path = find(tool)
    if path is None:
        return f"`{tool.command}` is not on PATH: {tool.remedy}"
    if tool == JAVA and (major := _java_major(path)) < JAVA_MAJOR_MIN:
        return f"`{tool.command}` is of Java {major}, {JAVA_MAJOR_MIN} is needed: {tool.remedy}"
    return None


def require(server: str, tools: tuple[Tool, ...]) -> None:
    """Raise MissingToolError with one line if the server lacks one of its tools."""
    for tool in tools:
        if found := problem(tool):
            raise MissingToolError(f"{server}: {found}")


def path_of(tool: Tool) -> str:
    """The program's path; raises MissingToolError when it is not there."""
    path = find(tool)
    if path is None:
        raise MissingToolError(f"`{tool.command}` is not on PATH: {tool.remedy}")
    return path


@functools.cache
def _java_major(path: str) -> int:
    """The major version that `java -version` tells; 0 when it tells none, which is too old."""
    told = subprocess.run([path, "-version"], capture_output=True, text=True, check=False)
    match = re.search(r'version "(\d+)', told.stderr + told.stdout)
    return int(match.group(1)) if match else 0
