package processes

import (
	"crypto/rand"
	"fmt"
	"io/fs"
	"os"
	"os/user"
	"path/filepath"
	"strconv"

	"mailproof/infra/guardian"
)

// userFor returns whom to run a server as: nil, which is the caller itself,
// unless the caller is root; then the user that the server's package made.
func userFor(name string) (*guardian.User, error) {
	if os.Geteuid() != 0 {
		return nil, nil
	}
	u, err := user.Lookup(name)
	if err != nil {
		return nil, fmt.Errorf("this server does not run as root: %w", err)
	}
	uid, err := strconv.ParseUint(u.Uid, 10, 32)
	if err != nil {
		return nil, fmt.Errorf("user %s: %w", name, err)
	}
	gid, err := strconv.ParseUint(u.Gid, 10, 32)
	if err != nil {
		return nil, fmt.Errorf("group of user %s: %w", name, err)
	}
	return &guardian.User{UID: uint32(uid), GID: uint32(gid)}, nil
}

// own gives path and what is below it to owner; nil leaves it as it is.
func own(path string, owner *guardian.User) error {
	if owner == nil {
		return nil
	}
	return filepath.WalkDir(path, func(p string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		return os.Chown(p, int(owner.UID), int(owner.GID))
	})
}

// secret makes a password for the run: 128 bits and more, letters and digits.
func secret() string { return rand.Text() }

// plainEnv is the environment of every server: nothing of the caller's, which
// could hold settings such as PGPORT, ERL_FLAGS or JAVA_TOOL_OPTIONS.
func plainEnv(home string, more ...string) []string {
	return append([]string{
		"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
		"HOME=" + home,
		"LANG=C.UTF-8",
		"LC_ALL=C.UTF-8",
	}, more...)
}

// checkEntry refuses a folder that another user than the caller cannot pass
// through, such as one below root's home: its server would fail with an error
// that names neither the folder nor the reason.
func checkEntry(dir string) error {
	if os.Geteuid() != 0 {
		return nil
	}
	for d := dir; ; d = filepath.Dir(d) {
		info, err := os.Stat(d)
		if err != nil {
			return err
		}
		if info.Mode().Perm()&0o001 == 0 {
			return fmt.Errorf("the data would be below %s, which users other than its owner cannot enter: set TMPDIR to another folder", d)
		}
		if d == filepath.Dir(d) {
			return nil
		}
	}
}
