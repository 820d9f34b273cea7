//! Cross entropy of the next token: `loss_t = log(sum exp(logits_t)) - logits_t[label_t]`; its mean is the
//! training loss.

use super::{Real, narrow, widen};

/// logits (T, V), labels (T), each below V -> losses (T), in nats.
pub fn forward<T: Real>(logits: &[T], labels: &[u32], vocabulary: usize) -> Vec<T> {
    check(logits.len(), labels.len(), vocabulary);
    let loss = |(row, &label): (&[T], &u32)| {
        let row = widen(row);
        T::narrow(log_sum_exp(&row) - row[label as usize])
    };
    logits.chunks(vocabulary).zip(labels).map(loss).collect()
}

/// The mean of the losses (T), in nats per token.
pub fn mean<T: Real>(losses: &[T]) -> f64 {
    losses.iter().map(|l| l.wide()).sum::<f64>() / losses.len() as f64
}

/// d_logits (T, V) = `factor * (softmax(logits) - onehot(label))`; factor 1/T for the mean.
pub fn backward<T: Real>(logits: &[T], labels: &[u32], vocabulary: usize, factor: f64) -> Vec<T> {
    check(logits.len(), labels.len(), vocabulary);
    let mut d_logits = Vec::with_capacity(logits.len());
    for (row, &label) in logits.chunks(vocabulary).zip(labels) {
        let row = widen(row);
        let lse = log_sum_exp(&row);
        let start = d_logits.len();
        d_logits.extend(row.iter().map(|l| factor * (l - lse).exp()));
        d_logits[start + label as usize] -= factor;
    }
    narrow(&d_logits)
}

/// `log(sum exp(row))`, from the largest element so that nothing overflows.
fn log_sum_exp(row: &[f64]) -> f64 {
    let top = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    top + row.iter().map(|l| (l - top).exp()).sum::<f64>().ln()
}

#[track_caller]
fn check(logits: usize, labels: usize, vocabulary: usize) {
    assert_eq!(logits, labels * vocabulary, "{logits} logits for {labels} labels and {vocabulary} words");
}
