//! The optimizer and the learning-rate schedule.

mod adamw;
mod schedule;

pub use adamw::{AdamW, Hyper};
pub use schedule::Schedule;
