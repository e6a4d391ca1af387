//! Names the library as programs ask for it: the loader finds a library that is already open by
//! this name, so a test opens the file first, and then the driver.

fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libcuda.so");
    println!("cargo::rerun-if-changed=build.rs");
}
