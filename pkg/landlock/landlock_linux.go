package landlock

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	// fileRights are the handled rights that a rule about a file may have; truncateRight is one of them since ABI 3.
	fileRights    = unix.LANDLOCK_ACCESS_FS_READ_FILE | unix.LANDLOCK_ACCESS_FS_WRITE_FILE | truncateRight
	truncateRight = unix.LANDLOCK_ACCESS_FS_TRUNCATE
	// socketRights are the rights in Rules.Sockets.
	socketRights = unix.LANDLOCK_ACCESS_FS_MAKE_SOCK | unix.LANDLOCK_ACCESS_FS_REMOVE_FILE
	// folderRights are all handled rights.
	folderRights = fileRights | socketRights | unix.LANDLOCK_ACCESS_FS_REMOVE_DIR | unix.LANDLOCK_ACCESS_FS_REFER |
		unix.LANDLOCK_ACCESS_FS_MAKE_CHAR | unix.LANDLOCK_ACCESS_FS_MAKE_DIR | unix.LANDLOCK_ACCESS_FS_MAKE_REG |
		unix.LANDLOCK_ACCESS_FS_MAKE_FIFO | unix.LANDLOCK_ACCESS_FS_MAKE_BLOCK | unix.LANDLOCK_ACCESS_FS_MAKE_SYM
)

// ABI returns the version of Landlock's ABI, or 0 if the kernel has no Landlock or has it turned off.
func ABI() int {
	version, _, errno := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, 0, 0, unix.LANDLOCK_CREATE_RULESET_VERSION)
	if errno != 0 {
		return 0
	}
	return int(version) //nolint:gosec // a small number
}

// Start starts a command as cmd.Start does, with the rules for its process and all descendants. The process starts as the
// program launcher with the arguments args, which must call Exec with all arguments that follow them.
func (r Rules) Start(cmd *exec.Cmd, launcher string, args ...string) error {
	if cmd.Err != nil {
		return cmd.Err
	}
	if _, err := exec.LookPath(cmd.Path); err != nil { // the launcher could only report it by its exit code
		return err
	}
	rules, err := r.open()
	if err != nil {
		return err
	}
	defer rules.Close() //nolint:errcheck // nothing was written
	descriptor := strconv.Itoa(firstExtraFile + len(cmd.ExtraFiles))
	cmd.Args = slices.Concat([]string{launcher}, args, []string{descriptor, cmd.Path}, cmd.Args)
	cmd.Path, cmd.ExtraFiles = launcher, append(cmd.ExtraFiles, rules.File)
	return cmd.Start()
}

// firstExtraFile is the descriptor of the first file of exec.Cmd.ExtraFiles.
const firstExtraFile = 3

// Exec restricts the calling thread to the rules of Rules.Start and replaces the process by the command. args are the
// arguments that Rules.Start passes to its launcher. It returns only an error.
//
// A separate program restricts itself, and not a thread of the program that calls Start: a process may read the memory of
// each process that has a thread with the same rules.
func Exec(args []string) error {
	if len(args) < 3 {
		return errors.New("landlock: a descriptor, a path and a command are required")
	}
	fd, err := strconv.Atoi(args[0])
	if err != nil {
		return fmt.Errorf("landlock: descriptor: %w", err)
	}
	unix.CloseOnExec(fd)
	runtime.LockOSThread() // the thread that is restricted must be the one that executes the command
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("landlock: give up new privileges: %w", err)
	}
	if _, _, errno := unix.Syscall(unix.SYS_LANDLOCK_RESTRICT_SELF, uintptr(fd), 0, 0); errno != 0 {
		return fmt.Errorf("landlock: restrict this process: %w", errno)
	}
	return fmt.Errorf("start %s: %w", args[1], unix.Exec(args[1], args[2:], os.Environ()))
}

// ruleset is an open ruleset of Landlock.
type ruleset struct {
	*os.File
	handled uint64
}

// open creates the ruleset of the rules.
func (r Rules) open() (*ruleset, error) {
	abi := ABI()
	if abi < MinABI {
		return nil, ErrUnsupported
	}
	attr := unix.LandlockRulesetAttr{Handled_access_fs: folderRights}
	if abi < 3 {
		attr.Handled_access_fs &^= truncateRight
	}
	fd, _, errno := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, uintptr(unsafe.Pointer(&attr)), unsafe.Sizeof(attr), 0)
	if errno != 0 {
		return nil, fmt.Errorf("landlock: create a ruleset: %w", errno)
	}
	rules := &ruleset{os.NewFile(fd, "landlock"), attr.Handled_access_fs}
	if err := r.addAll(rules); err != nil {
		return nil, errors.Join(fmt.Errorf("landlock: %w", err), rules.Close())
	}
	return rules, nil
}

// addAll adds all rules to a ruleset.
func (r Rules) addAll(rules *ruleset) error {
	hidden := make([]string, 0, len(r.Hidden))
	for _, dir := range r.Hidden {
		real, err := filepath.EvalSymlinks(dir)
		if err != nil {
			return fmt.Errorf("hidden folder: %w", err)
		}
		if real == "/" {
			return fmt.Errorf("hidden folder %s: is the root of the file system", dir)
		}
		hidden = append(hidden, real)
	}
	for _, path := range r.Visible {
		if err := rules.allow(path, folderRights); err != nil {
			return fmt.Errorf("visible path: %w", err)
		}
	}
	for _, dir := range r.Readable {
		if err := rules.allow(dir, unix.LANDLOCK_ACCESS_FS_READ_FILE); err != nil {
			return fmt.Errorf("readable folder: %w", err)
		}
	}
	for _, dir := range r.Sockets {
		if err := rules.allow(dir, socketRights); err != nil {
			return fmt.Errorf("folder of sockets: %w", err)
		}
	}
	return rules.allowAround("/", hidden)
}

// allowAround allows the entries of dir, a folder above each hidden folder that it contains, and leaves out the hidden
// folders.
func (s *ruleset) allowAround(dir string, hidden []string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrPermission) {
		// The folder may still be entered: of its entries, only those above the hidden folders are known.
		for _, h := range hidden {
			rest, below := strings.CutPrefix(h, strings.TrimSuffix(dir, "/")+"/")
			name, _, isAbove := strings.Cut(rest, "/")
			path := filepath.Join(dir, name)
			if !below || !isAbove || slices.Contains(hidden, path) {
				continue
			}
			if err := s.allowAround(path, hidden); err != nil {
				return err
			}
		}
		return nil
	}
	if err != nil {
		return err
	}
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		switch {
		case slices.Contains(hidden, path), e.Type()&fs.ModeSymlink != 0: // access through a link needs the rights of its target
		case slices.ContainsFunc(hidden, func(h string) bool { return strings.HasPrefix(h, path+"/") }):
			if err := s.allowAround(path, hidden); err != nil {
				return err
			}
		default:
			// An entry that was removed meanwhile, or whose file system does not respond, cannot be opened anyway.
			if err := s.allow(path, folderRights); err != nil && !errors.As(err, new(*fs.PathError)) {
				return err
			}
		}
	}
	return nil
}

// allow adds a rule for a file, or for a folder and everything below it. If the path cannot be opened, the error is an
// *fs.PathError.
func (s *ruleset) allow(path string, rights uint64) error {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return &fs.PathError{Op: "open", Path: path, Err: err}
	}
	defer unix.Close(fd) //nolint:errcheck // nothing was written
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return &fs.PathError{Op: "stat", Path: path, Err: err}
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		rights &= fileRights
	}
	attr := unix.LandlockPathBeneathAttr{Allowed_access: rights & s.handled, Parent_fd: int32(fd)} //nolint:gosec // a descriptor
	_, _, errno := unix.Syscall6(unix.SYS_LANDLOCK_ADD_RULE, s.Fd(), unix.LANDLOCK_RULE_PATH_BENEATH, uintptr(unsafe.Pointer(&attr)), 0, 0, 0)
	if errno != 0 {
		return fmt.Errorf("add a rule for %s: %w", path, errno)
	}
	return nil
}
