"""One model over several ranks: rank zero beside the scheduler, others in their own processes."""
