//! What to fetch ahead: the order in which a model's parts are used, learned from the last pass
//! over it.

/// The order in which units (modules with parameters on the servers) were used in the last pass,
/// and how far this one is. A pass that takes another way is followed where it comes back to a
/// known one; it only costs waiting.
#[derive(Debug, Clone)]
pub struct Schedule {
    /// Bytes of each unit.
    sizes: Vec<usize>,
    /// Bytes that may be fetched ahead.
    window: usize,
    /// The last pass.
    known: Vec<usize>,
    /// This pass, as far as it is.
    pass: Vec<usize>,
    /// Where in `known` this pass is; `None` while it has left it.
    at: Option<usize>,
}

impl Schedule {
    /// For units of so many bytes, of which `window` bytes may be fetched ahead; one unit always
    /// may.
    pub fn new(sizes: Vec<usize>, window: usize) -> Self {
        Self { sizes, window, known: Vec::new(), pass: Vec::new(), at: Some(0) }
    }

    /// Notes that `unit` is used now. The units that follow, nearest first: `unit` itself where it
    /// is used again at once, as the last of a forward is.
    pub fn enter(&mut self, unit: usize) -> Vec<usize> {
        self.pass.push(unit);
        let from = self.at.unwrap_or(0);
        let position =
            |range: std::ops::Range<usize>| range.into_iter().find(|&at| self.known[at] == unit);
        let found = position(from..self.known.len()).or_else(|| position(0..from));
        self.at = found.map(|found| found + 1);
        self.ahead()
    }

    /// A new pass begins. The units that it begins with, if it takes the way of the last. (A pass
    /// that only broke off, as an evaluation does before its backward, is nothing to learn from.)
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
    fn the_next_units_are_fetched_as_far_as_the_window_goes() {
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
    fn a_pass_that_breaks_off_is_not_learned() {
        let mut schedule = learned(20, &[0, 1, 1, 0]);
        schedule.restart();
        schedule.enter(0);
        schedule.enter(1);
        assert_eq!(schedule.restart(), [0, 1]);
        assert_eq!(schedule.enter(0), [1, 0]);
    }

    #[test]
    fn one_unit_is_fetched_ahead_however_large_it_is() {
        let mut schedule = learned(1, &[0, 1, 2]);
        assert_eq!(schedule.restart(), [0]);
        assert_eq!(schedule.enter(0), [1]);
    }

    #[test]
    fn another_order_is_followed_where_it_is_known_again() {
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
