"""What tests of several rooms share: a proxy that injects faults, and counters of what arrived."""
