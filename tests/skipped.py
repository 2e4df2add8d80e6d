"""Prints the tests that runs skipped, as arguments of pytest, from the runs' JUnit reports.

pytest --junitxml=report.xml; python tests/skipped.py report.xml > skipped; pytest @skipped

Of files that are skipped for one reason, at one line of a module that they import, a run in several
processes reports one. A run with `-n 0` and `-k` reports all of them in seconds.
"""

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path


def skipped(report: Path) -> list[str]:
    """Returns files that were skipped as a whole, and single tests of other files.

    Args:
        report: A JUnit report by pytest.
    """
    found = []
    for case in ElementTree.parse(report).iter("testcase"):
        if case.find("skipped") is not None:
            # A file that is skipped has its own name and no class.
            name, single = case.attrib["name"], case.attrib["classname"]
            file = (single or name).replace(".", "/") + ".py"
            found.append(f"{file}::{name}" if single else file)
    return found


if __name__ == "__main__":
    print(*dict.fromkeys(x for report in sys.argv[1:] for x in skipped(Path(report))), sep="\n")
