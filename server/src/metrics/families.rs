//! Families of metrics: their names, types, labels and help texts.

use prometheus::{
    CounterVec, GaugeVec, HistogramOpts, HistogramVec, IntCounterVec, IntGaugeVec, Opts, Registry,
    core::Collector,
};

/// The prefix of all names, without the underscore that follows it.
const NAMESPACE: &str = "zeroshard";

/// The bounds of the histograms in seconds: 100 us to 100 s.
const SECONDS: [f64; 19] = [
    0.0001, 0.000_25, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5,
    5.0, 10.0, 25.0, 50.0, 100.0,
];

/// Declares a struct with a field for each family: its type, name, labels and help text. `new`
/// registers them; the struct may have one more field, which `new` receives.
macro_rules! families {
    (
        $(#[$about:meta])*
        $visible:vis struct $Struct:ident($($more:ident: $More:ty)?);
        $($field:ident: $kind:ident($name:literal, [$($label:literal),*]) = $help:literal;)*
    ) => {
        $(#[$about])*
        #[derive(Debug, Clone)]
        $visible struct $Struct {
            $($field: $crate::metrics::families::family!($kind),)*
            $($more: $More,)?
        }

        impl $Struct {
            pub(in crate::metrics) fn new(
                families: &mut $crate::metrics::families::Families,
                $($more: $More,)?
            ) -> Self {
                Self {
                    $($field: families.$kind($name, $help, &[$($label),*]),)*
                    $($more,)?
                }
            }
        }
    };
}

/// The type of a family.
macro_rules! family {
    (counters) => {
        prometheus::IntCounterVec
    };
    (seconds) => {
        prometheus::CounterVec
    };
    (gauges) => {
        prometheus::IntGaugeVec
    };
    (real_gauges) => {
        prometheus::GaugeVec
    };
    (histograms) => {
        prometheus::HistogramVec
    };
}

pub(super) use {families, family};

/// Registers families. A family without series is not shown.
#[derive(Debug, Default)]
pub(super) struct Families {
    pub(super) registry: Registry,
    /// All families, also those without series.
    #[cfg(test)]
    pub(super) all: Vec<Family>,
}

/// The description of a family.
#[cfg(test)]
#[derive(Debug)]
pub(super) struct Family {
    pub(super) name: String,
    pub(super) kind: &'static str,
    pub(super) labels: Vec<String>,
    pub(super) help: String,
}

impl Families {
    pub(super) fn counters(&mut self, name: &str, help: &str, labels: &[&str]) -> IntCounterVec {
        self.register("counter", IntCounterVec::new(options(name, help), labels))
    }

    pub(super) fn seconds(&mut self, name: &str, help: &str, labels: &[&str]) -> CounterVec {
        self.register("counter", CounterVec::new(options(name, help), labels))
    }

    pub(super) fn gauges(&mut self, name: &str, help: &str, labels: &[&str]) -> IntGaugeVec {
        self.register("gauge", IntGaugeVec::new(options(name, help), labels))
    }

    pub(super) fn real_gauges(&mut self, name: &str, help: &str, labels: &[&str]) -> GaugeVec {
        self.register("gauge", GaugeVec::new(options(name, help), labels))
    }

    pub(super) fn histograms(&mut self, name: &str, help: &str, labels: &[&str]) -> HistogramVec {
        let options = HistogramOpts::new(name, help).namespace(NAMESPACE);
        let options = options.buckets(SECONDS.to_vec());
        self.register("histogram", HistogramVec::new(options, labels))
    }

    fn register<C: Collector + Clone + 'static>(
        &mut self,
        kind: &'static str,
        collector: prometheus::Result<C>,
    ) -> C {
        let collector = collector.expect("names and labels are well-formed");
        self.note(kind, &collector);
        self.registry.register(Box::new(collector.clone())).expect("names are unique");
        collector
    }

    #[cfg(test)]
    fn note(&mut self, kind: &'static str, collector: &impl Collector) {
        self.all.extend(collector.desc().into_iter().map(|desc| Family {
            name: desc.fq_name.clone(),
            kind,
            labels: desc.variable_labels.clone(),
            help: desc.help.clone(),
        }));
    }

    #[cfg(not(test))]
    fn note(&mut self, _: &'static str, _: &impl Collector) {}
}

fn options(name: &str, help: &str) -> Opts {
    Opts::new(name, help).namespace(NAMESPACE)
}
