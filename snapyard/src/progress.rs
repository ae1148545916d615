//! Progress of long work on standard error: a bar on a terminal, a line per step elsewhere.

use std::io::IsTerminal as _;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

/// Shows the steps of one piece of work.
#[derive(Debug)]
pub struct Progress {
    what: String,
    /// `None` when standard error is no terminal.
    bar: Option<ProgressBar>,
    step: String,
}

impl Progress {
    /// Begins showing; `what` names the work, e.g. `template base`.
    pub fn start(what: impl Into<String>) -> Self {
        let what = what.into();
        let bar = std::io::stderr().is_terminal().then(|| {
            let style = ProgressStyle::with_template("{prefix} [{bar:30}] {percent:>3} % {elapsed:>4}  {wide_msg}")
                .expect("the template is well-formed");
            let bar = ProgressBar::new(100).with_style(style.progress_chars("=> ")).with_prefix(what.clone());
            bar.enable_steady_tick(Duration::from_millis(500));
            bar
        });
        Self { what, bar, step: String::new() }
    }

    /// What is being done now, and how much of the whole is done.
    pub fn update(&mut self, step: &str, percent: u32) {
        match &self.bar {
            Some(bar) => {
                bar.set_position(u64::from(percent.min(100)));
                bar.set_message(step.to_owned());
            }
            None if step != self.step => eprintln!("{}: {percent:>3} % {step}", self.what),
            None => {}
        }
        step.clone_into(&mut self.step);
    }

    /// Takes the bar away and leaves a line.
    pub fn finish(self, outcome: &str) {
        if let Some(bar) = self.bar {
            bar.finish_and_clear();
        }
        eprintln!("{}: {outcome}", self.what);
    }
}
