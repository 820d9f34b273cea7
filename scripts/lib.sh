# shellcheck shell=bash
# What this machine has, as small questions. Sourced by setup.sh, features.sh, run_train.sh and run_tests.sh.
#
# MOE8_ROOT=DIR         look at the files below DIR instead of / (the tests give it a made-up machine)
# MOE8_OS_RELEASE=FILE  read this file instead of /etc/os-release; ID=macos stands for macOS
# MOE8_MPI=0 | 1        never, or in any case, build with MPI
# Written for bash 3.2, which macOS still ships.

root=${MOE8_ROOT:-}

# Rust from rustup, in a shell that has not read its profile yet.
if [ -z "$root" ] && ! command -v cargo >/dev/null 2>&1 && [ -x "${CARGO_HOME:-${HOME:-}/.cargo}/bin/cargo" ]; then
    PATH=${CARGO_HOME:-$HOME/.cargo}/bin:$PATH
fi

say() { printf 'moe8: %s\n' "$*"; }
fail() { # fail CODE WHAT HINT
    printf 'moe8: error: %s\n  hint: %s\n' "$2" "$3" >&2
    exit "$1"
}

# Is there a program of this name?
have() {
    if [ -n "$root" ]; then [ -x "$root/usr/bin/$1" ]; else command -v "$1" >/dev/null 2>&1; fi
}

# Is one of these files there? (For patterns: a pattern without a match stands for itself, and is no file.)
any_file() {
    local file
    for file in "$@"; do [ -e "$file" ] && return 0; done
    return 1
}

# One value of os-release, without its quotes; nothing where it is not set.
os_release() {
    local file=${MOE8_OS_RELEASE:-$root/etc/os-release}
    [ -r "$file" ] || return 0
    sed -n "/^$1=/{s/^$1=//p;q;}" "$file" | tr -d "\"'"
}

# debian (with its descendants), fedora, arch, opensuse, alpine, macos or unknown.
os_family() {
    if [ -z "${MOE8_OS_RELEASE:-}" ] && [ "$(uname -s)" = Darwin ]; then
        echo macos
        return
    fi
    local id
    for id in $(os_release ID) $(os_release ID_LIKE); do
        case $id in
            debian | ubuntu) echo debian && return ;;
            fedora | rhel | centos) echo fedora && return ;;
            arch | archlinux | manjaro) echo arch && return ;;
            opensuse* | suse | sles) echo opensuse && return ;;
            alpine) echo alpine && return ;;
            macos) echo macos && return ;;
        esac
    done
    echo unknown
}

# --- Vulkan -----------------------------------------------------------------------------------------------------

vulkan_loader() {
    any_file "$root"/usr/lib/libvulkan.so.1 "$root"/usr/lib64/libvulkan.so.1 "$root"/usr/lib/*/libvulkan.so.1 \
        "$root"/usr/local/lib/libvulkan.so.1 && return 0
    [ -z "$root" ] && command -v ldconfig >/dev/null 2>&1 || return 1
    case $(ldconfig -p 2>/dev/null) in *libvulkan.so.1*) ;; *) return 1 ;; esac
}

# The driver manifests that the Vulkan loader would read, one a line.
icd_files() {
    local chosen=${VK_DRIVER_FILES:-${VK_ICD_FILENAMES:-}} file
    if [ -z "$root" ] && [ -n "$chosen" ]; then
        printf '%s\n' "$chosen" | tr ':' '\n'
        return
    fi
    for file in "$root"/usr/share/vulkan/icd.d/*.json "$root"/usr/local/share/vulkan/icd.d/*.json \
        "$root"/etc/vulkan/icd.d/*.json; do
        [ -e "$file" ] && printf '%s\n' "$file"
    done
}

# Is there a render node whose PCI vendor is $1? `-`: one that is no PCI device, as on ARM boards.
render_node() {
    local node vendor
    for node in "$root"/dev/dri/renderD*; do
        [ -e "$node" ] || continue
        vendor=$(cat "$root/sys/class/drm/${node##*/}/device/vendor" 2>/dev/null || echo -)
        [ "$vendor" = "$1" ] && return 0
    done
    return 1
}

# hardware: a driver and the device it drives (Mesa installs the drivers of every vendor, so the manifest alone says
# nothing); software: only lavapipe or SwiftShader; none.
vulkan_driver() {
    local file found=none
    while IFS= read -r file; do
        [ -e "$file" ] || continue
        case ${file##*/} in
            *lvp* | *lavapipe* | *swiftshader*) found=software ;;
            *gfxstream* | *virtio*) ;; # need a host that offers a GPU; lavapipe beside them does no harm
            *nvidia*) any_file "$root"/dev/nvidia[0-9]* "$root"/dev/nvidiactl && echo hardware && return ;;
            *dzn*) any_file "$root"/dev/dxg && echo hardware && return ;;
            *intel*) render_node 0x8086 && echo hardware && return ;;
            *radeon* | *amd*) render_node 0x1002 && echo hardware && return ;;
            *nouveau*) render_node 0x10de && echo hardware && return ;;
            *) render_node - && echo hardware && return ;;
        esac
    done <<LIST
$(icd_files)
LIST
    echo $found
}

# --- MPI --------------------------------------------------------------------------------------------------------

# Fedora and openSUSE keep MPI out of PATH until `module load`; take it from where they put it.
mpi_into_path() {
    [ -n "$root" ] || command -v mpicc >/dev/null 2>&1 && return 0
    local folder
    for folder in /usr/lib64/openmpi /usr/lib64/mpi/gcc/openmpi[0-9]*; do
        if [ -x "$folder/bin/mpicc" ]; then
            PATH=$folder/bin:$PATH
            export LD_LIBRARY_PATH=$folder/lib:$folder/lib64${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
            return 0
        fi
    done
}
mpi_into_path

mpi_compiler() { have "${MPICC:-mpicc}"; }
mpi_launcher() { # prints the name of the program that starts ranks
    local name
    for name in ${MPIRUN:-mpirun mpiexec}; do have "$name" && echo "$name" && return 0; done
    return 1
}

# The library and its own C headers (stddef.h and the like): bindgen needs both.
libclang() {
    local lib=$root/usr/lib
    [ -n "${LIBCLANG_PATH:-}" ] && any_file "$LIBCLANG_PATH" && return 0
    any_file /Library/Developer/CommandLineTools/usr/lib/libclang.dylib && [ -z "$root" ] && return 0
    any_file "$lib"/llvm*/lib/libclang.so* "$lib"/llvm*/lib/libclang-[0-9]*.so* "$lib"/*/libclang.so* \
        "$lib"/*/libclang-[0-9]*.so* "$lib"/libclang.so* "${lib}64"/libclang.so* "${lib}64"/llvm*/lib*/libclang.so* &&
        any_file "$lib"/llvm*/lib/clang/*/include/stddef.h "$lib"/clang/*/include/stddef.h \
            "${lib}64"/clang/*/include/stddef.h
}

# Why a build with MPI is not possible here; nothing where it is.
mpi_obstacle() {
    case ${MOE8_MPI:-} in
        0) echo "MOE8_MPI=0" && return ;;
        1) return ;;
    esac
    local missing=''
    mpi_compiler || missing="$missing ${MPICC:-mpicc}"
    mpi_launcher >/dev/null || missing="$missing ${MPIRUN:-mpirun}"
    libclang || missing="$missing libclang"
    [ -z "$missing" ] || echo "not found:$missing"
}

# Cargo's feature flags for this machine.
cargo_features() { [ -n "$(mpi_obstacle)" ] || echo "--features mpi"; }

cores() { getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1; }

# What lets mpirun start ranks anywhere: as root in a container, more ranks than cores, each rank on all cores (the
# default binds it, and all threads of its software driver, to one), waiting ranks giving way to working ones.
# Open MPI 4 reads OMPI_*, Open MPI 5 PRTE_*; MPICH needs and reads none of it.
mpi_environment() {
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1 \
        OMPI_MCA_hwloc_base_binding_policy=none OMPI_MCA_mpi_yield_when_idle=1 \
        PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe PRTE_MCA_hwloc_default_binding_policy=none
}
