//! The program: arguments in, exit code out.
