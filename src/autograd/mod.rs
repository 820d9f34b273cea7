//! The tape and its one table of rules.
