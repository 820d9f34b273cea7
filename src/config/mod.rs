//! The training configuration: torchtitan's keys of July 2025, parsed and checked.
