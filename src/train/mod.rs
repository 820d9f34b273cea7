//! The loop, its data, its files and its reports.
