"""The reader of Nsight Compute's report; running it needs a GPU."""

import pytest

from firesteel.errors import UnsupportedError

REPORT = """==PROF== Connected to process 1
"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","place_kernel","Duration","ns","4,500.5"
"0","place_kernel","SM Frequency","Ghz","1.7"
"0","place_kernel","Rule","",""
"1","gate_up_wgmma_kernel(CUtensorMap)","Duration","ms","1.61"
"1","gate_up_wgmma_kernel(CUtensorMap)","DRAM Throughput","%","20.72"
"""


def test_a_record_a_launch_in_microseconds_and_megahertz(counters) -> None:
    place, gate_up = counters.read_report(REPORT.splitlines())
    assert place == {"kernel": "place_kernel", "us": 4.5005, "sm_mhz": 1700.0}
    assert gate_up == {"kernel": "gate_up_wgmma_kernel", "us": 1610.0, "dram_percent": 20.72}


def test_no_report_is_no_record(counters) -> None:
    assert list(counters.read_report(["==ERROR== nothing was profiled"])) == []


def test_every_field_has_a_metric_of_its_own(counters) -> None:
    assert len(set(counters.METRICS.values())) == len(counters.METRICS)


def test_a_unit_that_is_not_known_is_refused(counters) -> None:
    report = REPORT.replace('"ns","4,500.5"', '"nsecond","4,500.5"')
    with pytest.raises(UnsupportedError, match=r"ncu: Duration is '4500.5' nsecond"):
        list(counters.read_report(report.splitlines()))
