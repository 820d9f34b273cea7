//! A language with a known entropy: text-like tokens from a seeded, counter-based generator.
//!
//! There are up to 124 words with Zipf's frequencies and four topics. A marker token opens a topic, which
//! holds until the next marker. Given topic g and token w, the next token is
//! - with probability 1/32 a marker, each as likely, else
//! - with 0.45 the successor of w that all topics share, with 0.35 its successor in topic g, and with 0.2 any
//!   word by its frequency.
//!
//! So a model gains at once by learning frequencies, then by looking at the previous token, and last by
//! looking back for the marker. Every row starts with a marker: all that the next token depends on is in the
//! row, and the mean entropy of the next token is exactly the loss that a perfect model has on average.
//! Below 16 words there is one topic and no marker.

use crate::num::formula::{fnv1a, splitmix64};

const MAX_WORDS: usize = 128;
const TOPICS: usize = 4;
/// Probabilities of the three kinds of next word; see the module.
const SHARED: f64 = 0.45;
const TOPICAL: f64 = 0.35;
const ANY: f64 = 1.0 - SHARED - TOPICAL;

/// The generator. Tokens `0..markers` are the markers, the next ones words, the most frequent first.
pub struct Synthetic {
    seed: u64,
    used: usize,
    topics: usize,
    markers: usize,
    /// Probability of a marker.
    new_topic: f64,
    /// Frequency of token i in [`ANY`]'s draw; 0 for markers.
    zipf: Vec<f64>,
    /// Its running sum, the last entry 1.
    cumulative: Vec<f64>,
    /// `[token]`
    shared: Vec<usize>,
    /// `[topic][token]`
    topical: Vec<Vec<usize>>,
}

/// What is left to learn, in nats per token, for models that know less or more of the language.
#[derive(Clone, Copy, Debug)]
pub struct Entropies {
    /// Knowing only how often each token occurs.
    pub unigram: f64,
    /// Knowing the previous token as well.
    pub bigram: f64,
    /// Knowing all: the mean loss of the perfect model.
    pub full: f64,
}

/// Random numbers in [0, 1) from a counter.
struct Draws {
    key: u64,
    count: u64,
}

impl Draws {
    fn next(&mut self) -> f64 {
        self.count += 1;
        (splitmix64(self.key, self.count - 1) >> 11) as f64 / (1u64 << 53) as f64
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() * n as f64) as usize
    }
}

impl Synthetic {
    /// The language for a model of `vocab` >= 2 words, and the text that `seed` picks. The language itself
    /// depends on `vocab` alone, and only below 128.
    pub fn new(vocab: u32, seed: u64) -> Self {
        assert!(vocab >= 2, "a language needs two words, not {vocab}");
        let used = MAX_WORDS.min(vocab as usize);
        let topics = if used >= 16 { TOPICS } else { 1 };
        let markers = if topics > 1 { topics } else { 0 };
        // Divisions and sums only, so that every platform draws the same words.
        let total: f64 = (0..used - markers).map(|i| 1.0 / (i + 1) as f64).sum();
        let zipf: Vec<f64> = (0..used)
            .map(|t| if t < markers { 0.0 } else { 1.0 / ((t - markers + 1) as f64 * total) })
            .collect();
        let mut cumulative: Vec<f64> = zipf
            .iter()
            .scan(0.0, |sum, p| {
                *sum += p;
                Some(*sum)
            })
            .collect();
        cumulative[used - 1] = 1.0;
        let new_topic = if topics > 1 { 1.0 / 32.0 } else { 0.0 };
        let mut language = Synthetic {
            seed,
            used,
            topics,
            markers,
            new_topic,
            zipf,
            cumulative,
            shared: vec![],
            topical: vec![],
        };
        let mut draws = Draws { key: fnv1a(b"moe8 synthetic language"), count: 0 };
        let successors = |draws: &mut Draws| (0..used).map(|_| language.any_word(draws)).collect::<Vec<_>>();
        let shared = successors(&mut draws);
        let topical = (0..topics).map(|_| successors(&mut draws)).collect();
        (language.shared, language.topical) = (shared, topical);
        language
    }

    /// A word by its frequency.
    fn any_word(&self, draws: &mut Draws) -> usize {
        let u = draws.next();
        self.cumulative.partition_point(|&c| c <= u)
    }

    /// The `len` tokens of row `index`; each row is drawn from its own stream.
    pub fn row(&self, index: u64, len: usize) -> Vec<u32> {
        let mut draws = Draws { key: splitmix64(splitmix64(self.seed, 0), index), count: 0 };
        let mut topic = draws.below(self.topics);
        let mut token = if self.markers > 0 { topic } else { self.any_word(&mut draws) };
        let mut row = vec![token as u32];
        while row.len() < len {
            if draws.next() < self.new_topic {
                topic = draws.below(self.topics);
                token = topic;
            } else {
                let u = draws.next();
                token = if u < SHARED {
                    self.shared[token]
                } else if u < SHARED + TOPICAL {
                    self.topical[topic][token]
                } else {
                    self.any_word(&mut draws)
                };
            }
            row.push(token as u32);
        }
        row
    }

    /// Adds `weight` times the distribution of the token after `token` in `topic` to `out`, `[used]`.
    fn add_next(&self, topic: usize, token: usize, weight: f64, out: &mut [f64]) {
        let word = weight * (1.0 - self.new_topic);
        for (p, z) in out.iter_mut().zip(&self.zipf) {
            *p += word * ANY * z;
        }
        out[self.shared[token]] += word * SHARED;
        out[self.topical[topic][token]] += word * TOPICAL;
        for p in &mut out[..self.markers] {
            *p += weight * self.new_topic / self.markers as f64;
        }
    }

    /// How often each (topic, token) is an input, averaged over the `seq_len` positions of a row:
    /// `[topic][token]`, exactly, by following the distribution from the row's start.
    fn occupancy(&self, seq_len: usize) -> Vec<Vec<f64>> {
        let mut now = vec![vec![0.0; self.used]; self.topics];
        for (g, p) in now.iter_mut().enumerate() {
            if self.markers > 0 {
                p[g] = 1.0 / self.topics as f64;
            } else {
                p.copy_from_slice(&self.zipf);
            }
        }
        let mut mean = vec![vec![0.0; self.used]; self.topics];
        for _ in 0..seq_len {
            let mut next = vec![vec![0.0; self.used]; self.topics];
            for g in 0..self.topics {
                let mass: f64 = now[g].iter().sum();
                for t in 0..self.used {
                    let word = now[g][t] * (1.0 - self.new_topic);
                    mean[g][t] += now[g][t] / seq_len as f64;
                    next[g][self.shared[t]] += word * SHARED;
                    next[g][self.topical[g][t]] += word * TOPICAL;
                    next[g][t] += mass * (1.0 - self.new_topic) * ANY * self.zipf[t];
                }
            }
            for (g, p) in next.iter_mut().enumerate().take(self.markers) {
                p[g] += self.new_topic / self.topics as f64;
            }
            now = next;
        }
        mean
    }

    /// The entropies of labels in rows of `seq_len`.
    pub fn entropies(&self, seq_len: usize) -> Entropies {
        let occupancy = self.occupancy(seq_len);
        let mut labels = vec![0.0; self.used];
        let (mut full, mut bigram) = (0.0, 0.0);
        for t in 0..self.used {
            let mut after_t = vec![0.0; self.used];
            let mut mass = 0.0;
            for (g, of_topic) in occupancy.iter().enumerate() {
                let mut next = vec![0.0; self.used];
                self.add_next(g, t, 1.0, &mut next);
                full += of_topic[t] * entropy(&next, 1.0);
                self.add_next(g, t, of_topic[t], &mut after_t);
                mass += of_topic[t];
            }
            bigram += mass * entropy(&after_t, mass);
            for (l, p) in labels.iter_mut().zip(&after_t) {
                *l += p;
            }
        }
        Entropies { unigram: entropy(&labels, 1.0), bigram, full }
    }

    /// One line for the log.
    pub(super) fn summary(&self, seq_len: usize) -> String {
        let e = self.entropies(seq_len);
        format!(
            "synthetic: {} words, {} topics; entropy {:.4} nats per token, which the mean loss cannot beat \
             (knowing only frequencies {:.4}, only the previous token {:.4})",
            self.used - self.markers,
            self.topics,
            e.full,
            e.unigram,
            e.bigram
        )
    }
}

/// Entropy in nats of the distribution `p / mass`; 0 when nothing is there.
fn entropy(p: &[f64], mass: f64) -> f64 {
    p.iter().filter(|&&p| p > 0.0).map(|p| -(p / mass) * (p / mass).ln()).sum()
}
