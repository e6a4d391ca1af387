//! Averaging: the parameters become the mean gradient.

use super::vectorised;

vectorised! {
    /// A step: `parameter = gradient * coefficient`, regardless of the previous parameter.
    pub fn step(coefficient: f32, parameter: &mut [f32], gradient: &[f32]) {
        let n = parameter.len();
        let gradient = &gradient[..n];
        for i in 0..n {
            parameter[i] = gradient[i] * coefficient;
        }
    }
}
