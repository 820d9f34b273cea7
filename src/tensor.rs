//! Shape, dtype and buffer handle.
