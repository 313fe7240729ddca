"""What every rank of a job did: timelines read from logs, and the sentences that follow from comparing ranks."""
