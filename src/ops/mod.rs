//! Forward and backward of each op as plain functions that record GPU work.
