"""Prints, as JSON, where the Python packages that the build uses keep their files. CMake runs this."""

import importlib.metadata
import importlib.util
import json
from pathlib import Path


def _directory(package: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    locations = list(spec.submodule_search_locations or []) if spec else []
    return Path(locations[0]) if locations else None


def _license(distribution: str) -> str:
    """The file that has to go with what contains parts of it."""
    files = importlib.metadata.files(distribution) or []
    return next((str(file.locate()) for file in files if file.name.upper().startswith("LICEN")), "")


def main() -> None:
    nanobind, jaxlib, nvidia = _directory("nanobind"), _directory("jaxlib"), _directory("nvidia")
    print(
        json.dumps(
            {
                "nanobind": str(nanobind / "cmake") if nanobind else "",
                "nanobind_license": _license("nanobind") if nanobind else "",
                "xla_include": str(jaxlib / "include") if jaxlib else "",
                "jaxlib_version": importlib.metadata.version("jaxlib") if jaxlib else "",
                "nvidia": str(nvidia) if nvidia else "",
            }
        )
    )


if __name__ == "__main__":
    main()
