//! Loops that only transfer memory, each with the reads and writes of one kind of step. They are
//! the limit against which the kernels are measured.

use super::vectorised;

vectorised! {
    /// Reads two arrays and writes one: a step without state.
    pub fn one(a: &mut [f32], gradient: &[f32]) {
        let n = a.len();
        let gradient = &gradient[..n];
        for i in 0..n {
            a[i] += gradient[i];
        }
    }
}

vectorised! {
    /// Reads three arrays and writes two: a step with one state tensor.
    pub fn two(a: &mut [f32], b: &mut [f32], gradient: &[f32]) {
        let n = a.len();
        let (b, gradient) = (&mut b[..n], &gradient[..n]);
        for i in 0..n {
            a[i] += gradient[i];
            b[i] += gradient[i];
        }
    }
}

vectorised! {
    /// Reads four arrays and writes three: a step with two state tensors.
    pub fn three(a: &mut [f32], b: &mut [f32], c: &mut [f32], gradient: &[f32]) {
        let n = a.len();
        let (b, c, gradient) = (&mut b[..n], &mut c[..n], &gradient[..n]);
        for i in 0..n {
            a[i] += gradient[i];
            b[i] += gradient[i];
            c[i] += gradient[i];
        }
    }
}
