//! What was measured: percentiles, a histogram, a table, JSON. Pure.
//!
//! A percentile is the smallest sample that at least so many percent of the samples do not exceed (nearest rank). One that the
//! samples are too few for (p95 of less than 20: it would be the maximum) is left out, and the text says so.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::failure::Failure;

use super::work::Sample;

const PERCENTILES: [(&str, u32); 3] = [("p50", 50), ("p95", 95), ("p99", 99)];

/// Bars of a histogram, at most.
const BARS: usize = 12;
const BAR_WIDTH: usize = 40;

/// Everything that was measured.
pub struct Report {
    operation: &'static str,
    concurrency: u32,
    dirty_mib: u32,
    series: Vec<(&'static str, Vec<Duration>)>,
    failures: Vec<Failure>,
    operations: u64,
    span: Option<(Instant, Instant)>,
}

impl Report {
    /// Nothing yet.
    pub fn new(operation: &'static str, concurrency: u32, dirty_mib: u32) -> Self {
        Self { operation, concurrency, dirty_mib, series: Vec::new(), failures: Vec::new(), operations: 0, span: None }
    }

    /// One operation that counts, from when to when it went.
    pub fn add(&mut self, outcome: Result<Vec<Sample>, Failure>, began: Instant, ended: Instant) {
        let (first, last) = self.span.unwrap_or((began, ended));
        self.span = Some((first.min(began), last.max(ended)));
        self.operations += 1;
        match outcome {
            Ok(samples) => samples.into_iter().for_each(|sample| self.sample(sample)),
            Err(failure) => self.failures.push(failure),
        }
    }

    fn sample(&mut self, Sample { series, took }: Sample) {
        match self.series.iter_mut().find(|(name, _)| *name == series) {
            Some((_, samples)) => samples.push(took),
            None => self.series.push((series, vec![took])),
        }
    }

    /// What failed.
    pub fn failures(&self) -> &[Failure] {
        &self.failures
    }

    fn wall(&self) -> Duration {
        self.span.map(|(first, last)| last - first).unwrap_or_default()
    }

    fn summaries(&self) -> Vec<Summary> {
        self.series.iter().map(|(name, samples)| Summary::of(name, samples)).collect()
    }

    /// For people.
    pub fn text(&self) -> String {
        let mut text = format!(
            "{}: {} operations, {} failed, concurrency {}, {} MiB made dirty before each, {:.2} s in all\n\n",
            self.operation,
            self.operations,
            self.failures.len(),
            self.concurrency,
            self.dirty_mib,
            self.wall().as_secs_f64()
        );
        let summaries = self.summaries();
        let _ = writeln!(
            text,
            "{:<24} {:>6} {:>9} {:>9} {:>9} {:>9} {:>9}",
            "ms", "count", "mean", "p50", "p95", "p99", "max"
        );
        for summary in &summaries {
            let _ = write!(text, "{:<24} {:>6} {:>9.1}", summary.name, summary.count, summary.mean_ms);
            for (_, value) in &summary.percentiles {
                let _ = match value {
                    Some(value) => write!(text, " {value:>9.1}"),
                    None => write!(text, " {:>9}", "-"),
                };
            }
            let _ = writeln!(text, " {:>9.1}", summary.max_ms);
        }
        for (name, percent) in PERCENTILES {
            if let Some(summary) = summaries.iter().find(|summary| summary.lacks(name)) {
                let needed = needed_for(percent);
                let _ = writeln!(text, "\n{name} needs {needed} samples; {} has {}", summary.name, summary.count);
            }
        }
        if let Some(summary) = summaries.first() {
            let _ = writeln!(text, "\n{}, ms", summary.name);
            let most = summary.histogram.iter().map(|bar| bar.count).max().unwrap_or(0).max(1);
            for bar in &summary.histogram {
                let width = (bar.count * BAR_WIDTH).div_ceil(most);
                let _ = writeln!(text, "  ≤ {:>9.1} {:>6}  {}", bar.up_to_ms, bar.count, "█".repeat(width));
            }
        }
        text
    }

    /// For programs. A percentile that the samples are too few for is `null`.
    pub fn json(&self) -> Value {
        let series: Vec<Value> = self.summaries().iter().map(Summary::json).collect();
        json!({
            "operation": self.operation,
            "concurrency": self.concurrency,
            "dirty_mib": self.dirty_mib,
            "count": self.operations,
            "errors": self.failures.len(),
            "wall_s": self.wall().as_secs_f64(),
            "series": series,
        })
    }
}

struct Bar {
    up_to_ms: f64,
    count: usize,
}

struct Summary {
    name: &'static str,
    count: usize,
    mean_ms: f64,
    percentiles: Vec<(&'static str, Option<f64>)>,
    max_ms: f64,
    histogram: Vec<Bar>,
}

impl Summary {
    /// Of at least one sample.
    fn of(name: &'static str, samples: &[Duration]) -> Self {
        let mut ms: Vec<f64> = samples.iter().map(|sample| sample.as_secs_f64() * 1000.0).collect();
        ms.sort_by(f64::total_cmp);
        Self {
            name,
            count: ms.len(),
            mean_ms: ms.iter().sum::<f64>() / ms.len() as f64,
            percentiles: PERCENTILES.iter().map(|&(name, percent)| (name, percentile(&ms, percent))).collect(),
            max_ms: ms.last().copied().unwrap_or_default(),
            histogram: histogram(&ms),
        }
    }

    fn lacks(&self, percentile: &str) -> bool {
        self.percentiles.iter().any(|(name, value)| *name == percentile && value.is_none())
    }

    fn json(&self) -> Value {
        let mut json = json!({"name": self.name, "count": self.count, "mean_ms": self.mean_ms, "max_ms": self.max_ms});
        for (name, value) in &self.percentiles {
            json[format!("{name}_ms")] = json!(value);
        }
        let bars = self.histogram.iter().map(|bar| json!({"up_to_ms": bar.up_to_ms, "count": bar.count}));
        json["histogram"] = bars.collect();
        json
    }
}

/// Samples below which the nearest rank of a percentile is the maximum.
fn needed_for(percent: u32) -> usize {
    100_usize.div_ceil((100 - percent) as usize)
}

/// Of sorted samples; `None` when they are too few.
fn percentile(sorted: &[f64], percent: u32) -> Option<f64> {
    if sorted.len() < needed_for(percent) {
        return None;
    }
    let rank = (sorted.len() * percent as usize).div_ceil(100);
    sorted.get(rank.max(1) - 1).copied()
}

/// Bars that grow in width by a constant factor from the smallest of the sorted samples to the largest.
fn histogram(sorted: &[f64]) -> Vec<Bar> {
    let (Some(&min), Some(&max)) = (sorted.first(), sorted.last()) else { return Vec::new() };
    // All in one bar, or with bars of at least a tenth of their place.
    let low = min.max(0.001);
    let bars = (((max / low).ln() / 1.1_f64.ln()).ceil().max(1.0) as usize).min(BARS);
    let factor = (max / low).powf(1.0 / bars as f64);
    let mut from = 0;
    (1..=bars)
        .map(|bar| {
            let up_to_ms = if bar == bars { max } else { low * factor.powi(bar as i32) };
            let to = from + sorted[from..].partition_point(|sample| *sample <= up_to_ms);
            let count = to - from;
            from = to;
            Bar { up_to_ms, count }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::failure::Kind;

    fn ms(values: impl IntoIterator<Item = u64>) -> Vec<Duration> {
        values.into_iter().map(Duration::from_millis).collect()
    }

    #[test]
    fn percentiles_are_samples_and_only_of_enough_of_them() {
        let hundred: Vec<f64> = (1..=100).map(f64::from).collect();
        assert_eq!(percentile(&hundred, 50), Some(50.0));
        assert_eq!(percentile(&hundred, 95), Some(95.0));
        assert_eq!(percentile(&hundred, 99), Some(99.0));
        assert_eq!(percentile(&hundred[..99], 99), None);
        assert_eq!(percentile(&hundred[..20], 95), Some(19.0));
        assert_eq!(percentile(&hundred[..19], 95), None);
        assert_eq!(percentile(&hundred[..2], 50), Some(1.0));
        assert_eq!(percentile(&[], 50), None);
    }

    #[test]
    fn every_sample_is_in_one_bar() {
        for samples in [ms([5]), ms([5, 5, 5]), ms([0, 1, 1000]), ms(1..=1000), ms([0])] {
            let summary = Summary::of("x", &samples);
            let counted: usize = summary.histogram.iter().map(|bar| bar.count).sum();
            assert_eq!(counted, samples.len());
            assert!(summary.histogram.len() <= BARS);
            assert!(summary.histogram.is_sorted_by(|a, b| a.up_to_ms <= b.up_to_ms));
        }
    }

    #[test]
    fn what_is_too_few_is_said() {
        let now = Instant::now();
        let mut report = Report::new("create", 2, 0);
        for took in ms([10, 20, 30]) {
            report.add(Ok(vec![Sample { series: "create", took }]), now, now + took);
        }
        report.add(Err(Failure::new(Kind::Refused, "no room")), now, now);
        let text = report.text();
        assert!(text.contains("4 operations, 1 failed"), "{text}");
        assert!(text.contains("p95 needs 20 samples; create has 3"), "{text}");
        assert!(!text.contains("p50 needs"), "{text}");
        let json = report.json();
        assert_eq!((&json["count"], &json["errors"]), (&json!(4), &json!(1)));
        let series = &json["series"][0];
        assert_eq!(
            (&series["p50_ms"], &series["p99_ms"], &series["max_ms"]),
            (&json!(20.0), &Value::Null, &json!(30.0))
        );
    }

    #[test]
    fn nothing_measured_is_no_percentile() {
        let report = Report::new("create", 1, 0);
        assert!(report.text().contains("0 operations"));
        assert_eq!(report.json()["series"], json!([]));
    }
}
