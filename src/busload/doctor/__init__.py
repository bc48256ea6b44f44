"""What is wrong with the server, the schema, the workers and the broker, why it matters, and what to do about it."""

from busload.doctor.finding import Diagnosis, Finding, FindingCode, Severity, Skipped
from busload.settings import DoctorSettings

__all__ = ["Diagnosis", "DoctorSettings", "Finding", "FindingCode", "Severity", "Skipped"]
