"""What each rank of a job did: timelines read from logs, and facts that follow from comparing ranks."""
