//! Prefetching: the order in which a model's parts are used, learned from the last pass.

/// The order in which units (modules with parameters on the servers) were used in the last pass,
/// and the position of the current pass. If a pass deviates from this order, the schedule resumes
/// when the pass returns to a known unit. A deviation only costs waiting time.
#[derive(Debug, Clone)]
pub struct Schedule {
    /// The size of each unit in bytes.
    sizes: Vec<usize>,
    /// The number of bytes that may be fetched ahead.
    window: usize,
    /// The last pass.
    known: Vec<usize>,
    /// The current pass so far.
    pass: Vec<usize>,
    /// The position of the current pass in `known`; `None` while it deviates.
    at: Option<usize>,
}

impl Schedule {
    /// Creates a schedule for units of these sizes in bytes, of which `window` bytes may be fetched
    /// ahead. One unit may always be fetched ahead.
    pub fn new(sizes: Vec<usize>, window: usize) -> Self {
        Self { sizes, window, known: Vec::new(), pass: Vec::new(), at: Some(0) }
    }

    /// Records that `unit` is used now. Returns the units that follow, nearest first. `unit` itself
    /// is among them if it is used again at once, as the last unit of a forward pass is.
    pub fn enter(&mut self, unit: usize) -> Vec<usize> {
        self.pass.push(unit);
        let from = self.at.unwrap_or(0);
        let position =
            |range: std::ops::Range<usize>| range.into_iter().find(|&at| self.known[at] == unit);
        let found = position(from..self.known.len()).or_else(|| position(0..from));
        self.at = found.map(|found| found + 1);
        self.ahead()
    }

    /// Begins a new pass. Returns the units at its beginning if it has the order of the last one.
    /// (A pass that was only interrupted, such as an evaluation without a backward pass, is not
    /// learned.)
    pub fn restart(&mut self) -> Vec<usize> {
        let pass = std::mem::take(&mut self.pass);
        if !self.known.starts_with(&pass) {
            self.known = pass;
        }
        self.at = Some(0);
        self.ahead()
    }

    fn ahead(&self) -> Vec<usize> {
        let Some(at) = self.at else { return Vec::new() };
        let (mut next, mut bytes) = (Vec::new(), 0);
        for &unit in &self.known[at..] {
            if next.contains(&unit) {
                continue;
            }
            bytes += self.sizes.get(unit).copied().unwrap_or(0);
            if bytes > self.window && !next.is_empty() {
                break;
            }
            next.push(unit);
        }
        next
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn learned(window: usize, pass: &[usize]) -> Schedule {
        let mut schedule = Schedule::new(vec![10; 5], window);
        pass.iter().for_each(|&unit| _ = schedule.enter(unit));
        schedule
    }

    #[test]
    fn nothing_is_known_in_the_first_pass() {
        let mut schedule = Schedule::new(vec![10; 3], 20);
        assert!(schedule.restart().is_empty());
        assert!(schedule.enter(0).is_empty());
    }

    #[test]
    fn the_next_units_are_fetched_within_the_window() {
        let mut schedule = learned(20, &[0, 1, 2, 3, 3, 2, 1, 0]);
        assert_eq!(schedule.restart(), [0, 1]);
        assert_eq!(schedule.enter(0), [1, 2]);
        assert_eq!(schedule.enter(1), [2, 3]);
        assert_eq!(schedule.enter(2), [3, 2]);
        assert_eq!(schedule.enter(3), [3, 2]);
        assert_eq!(schedule.enter(3), [2, 1]);
        assert_eq!(schedule.enter(2), [1, 0]);
    }

    #[test]
    fn an_interrupted_pass_is_not_learned() {
        let mut schedule = learned(20, &[0, 1, 1, 0]);
        schedule.restart();
        schedule.enter(0);
        schedule.enter(1);
        assert_eq!(schedule.restart(), [0, 1]);
        assert_eq!(schedule.enter(0), [1, 0]);
    }

    #[test]
    fn one_unit_is_fetched_ahead_regardless_of_its_size() {
        let mut schedule = learned(1, &[0, 1, 2]);
        assert_eq!(schedule.restart(), [0]);
        assert_eq!(schedule.enter(0), [1]);
    }

    #[test]
    fn a_deviating_pass_is_followed_from_the_next_known_unit() {
        let mut schedule = learned(10, &[0, 1, 2, 3]);
        schedule.restart();
        assert_eq!(schedule.enter(0), [1]);
        assert_eq!(schedule.enter(2), [3]);
        assert!(schedule.enter(4).is_empty());
        assert_eq!(schedule.enter(1), [2]);
        assert_eq!(schedule.restart(), [0]);
        assert_eq!(schedule.enter(0), [2]);
    }
}
