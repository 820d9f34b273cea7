//! The loop, its data, its files and its reports.

pub mod data;
pub mod logger;
pub mod metrics;
pub mod report;
pub mod run;
pub mod state;
pub mod tokenizer;
pub mod trainer;
pub mod weights;
mod window;
