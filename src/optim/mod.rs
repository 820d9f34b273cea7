//! AdamW, clipping, schedules and the expert bias update.
