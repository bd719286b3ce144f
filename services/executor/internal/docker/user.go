package docker

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"github.com/docker/docker/api/types/filters"
	"github.com/docker/docker/api/types/mount"
	"github.com/docker/docker/api/types/system"
	"github.com/docker/docker/api/types/volume"

	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/services/executor/internal/guest"
)

// The kernel counts inotify instances, pending signals, pipe buffers and more for each user of
// the machine, over all containers. So each sandbox, and each MCP server of a sandbox, runs as
// a separate user, whose group has the same number.
//
// A user belongs to the volumes of a sandbox, and to the sandboxes that take them over. The volume
// spool-user-<number> reserves the user: the engine creates a volume of a name only once, so two
// executors cannot reserve the same number, and the engine keeps the volume while a container
// mounts it. The volume also holds the container's /etc/passwd and /etc/group.

const (
	// earlierReleaseUser is the user number of all sandboxes of earlier releases, in which all sandboxes had the same user.
	earlierReleaseUser = 10001
	// serviceImageUser is the user number of the processes in the images of Spool's services.
	serviceImageUser = 10001
	// nobodyUser and invalidUser are user numbers with a special meaning in the kernel, so no sandbox may have them.
	nobodyUser, invalidUser = 65534, 65535
	// minUser is the first user number that is not reserved for system accounts.
	minUser = 1000
	// maxUser is the largest user number that archives in the ustar format can hold.
	maxUser = 1<<21 - 1
	// mappedUsers is the number of user numbers in a container if the engine uses user namespaces.
	mappedUsers = 1 << 16
)

// userDir is the path in a container at which the volume that reserves the container's user number is mounted.
const userDir = "/spool/user"

// UserRange is a range of user numbers for sandboxes, including both ends.
type UserRange struct{ First, Last int }

// ParseUserRange parses a range of user numbers in the form FIRST-LAST.
func ParseUserRange(s string) (UserRange, error) {
	first, last, found := strings.Cut(s, "-")
	a, err1 := strconv.Atoi(first)
	b, err2 := strconv.Atoi(last)
	if !found || err1 != nil || err2 != nil {
		return UserRange{}, fmt.Errorf("%q is not a range of user numbers like 70000-99999", s)
	}
	u := UserRange{First: a, Last: b}
	return u, u.validate()
}

// validate returns an error if the range is empty, is out of bounds, or includes a reserved user number.
func (u UserRange) validate() error {
	switch {
	case u.First > u.Last:
		return fmt.Errorf("range %s is empty: its first number is larger than its last", u)
	case u.First < minUser || u.Last > maxUser:
		return fmt.Errorf("range %s is not between %d and %d", u, minUser, maxUser)
	}
	for _, n := range []int{serviceImageUser, egressUser, nobodyUser, invalidUser} {
		if u.First <= n && n <= u.Last {
			return fmt.Errorf("range %s includes %d, which is reserved: %d is the services' user, %d the egress proxy's, %d nobody, %d is invalid",
				u, n, serviceImageUser, egressUser, nobodyUser, invalidUser)
		}
	}
	return nil
}

// String returns the range in the form FIRST-LAST.
func (u UserRange) String() string { return fmt.Sprintf("%d-%d", u.First, u.Last) }

// checkUsers returns an error if the Docker engine cannot run containers as the users of the configured range.
func (p *Provider) checkUsers(info system.Info) error {
	mapped := slices.ContainsFunc(info.SecurityOptions, func(o string) bool {
		return strings.HasPrefix(o, "name=userns") || strings.HasPrefix(o, "name=rootless")
	})
	if !mapped || p.cfg.Users.Last < mappedUsers {
		return nil
	}
	return guest.WithCode(sandbox.CodeSandboxFailed, fmt.Sprintf("the engine maps user numbers and has none above %d: set SPOOL_SANDBOX_UIDS, which is %s, to a range below", mappedUsers-1, p.cfg.Users), nil)
}

// user is the user of a container: its number, and the volume that reserves the number.
type user struct {
	id  int
	dir string // the engine's path of the volume; "" for earlierReleaseUser, which has none
}

const userPrefix = namePrefix + "user-"

// userVolumeName returns the name of the volume that reserves a user number.
func userVolumeName(id int) string { return userPrefix + strconv.Itoa(id) }

// String returns the user in the format of a container's config.
func (u user) String() string { return fmt.Sprintf("%d:%d", u.id, u.id) }

// mounts returns the mounts of the volume that reserves the user's number, and of the passwd and group files in it. The engine cannot
// remove the volume while a container mounts it. An engine before version 26 cannot mount a single file of a volume, so the files are
// mounted by their path on the engine's machine.
func (u user) mounts(pic imageInfo) []mount.Mount {
	if u.dir == "" {
		return nil
	}
	out := []mount.Mount{helperVolume{name: userVolumeName(u.id)}.mount(userDir, true)}
	for _, f := range accountFiles {
		out = append(out, mount.Mount{Type: mount.TypeBind, Source: u.dir + "/" + pic.accountFileName(f), Target: "/etc/" + f, ReadOnly: true})
	}
	return out
}

// reservationLabels returns the labels of a volume that reserves a user number for the sandbox owner.
func (p *Provider) reservationLabels(owner string) map[string]string {
	return map[string]string{labelVersion: labelsVersion, labelRole: roleUser, labelEngine: p.cfg.Engine, labelVolumesOwner: owner}
}

// hasReservationLabels reports whether the labels is of a volume contain the labels want of a reservation of a user number.
func hasReservationLabels(is, want map[string]string) bool {
	for _, l := range []string{labelRole, labelEngine, labelVolumesOwner, labelServerDefinition} {
		if is[l] != want[l] {
			return false
		}
	}
	return true
}

// reserveUser reserves the user number id by creating a volume with the labels. It returns false if another owner has reserved the
// number.
func (p *Provider) reserveUser(ctx context.Context, id int, labels map[string]string) (user, bool, error) {
	name := userVolumeName(id)
	for {
		made, err := callEngine(ctx, p, "reserve user "+strconv.Itoa(id), func(ctx context.Context) (volume.Volume, error) {
			return p.api.VolumeCreate(ctx, volume.CreateOptions{Name: name, Labels: labels}) // or finds the existing one
		})
		if err == nil && made.Labels[labelRole] == "" { // the engine created it for a container that started too late
			var gone bool
			if gone, err = p.removeVolume(ctx, name); gone && err == nil {
				continue
			}
		}
		return user{id: id, dir: made.Mountpoint}, err == nil && hasReservationLabels(made.Labels, labels), err
	}
}

// randomUserTries is the number of random user numbers that reserveNewUser tries before it lists the reserved numbers.
const randomUserTries = 4

// reserveNewUser reserves a user number of the configured range that nobody has reserved.
func (p *Provider) reserveNewUser(ctx context.Context, labels map[string]string) (user, error) {
	size := p.cfg.Users.Last - p.cfg.Users.First + 1
	for range randomUserTries {
		if u, mine, err := p.reserveUser(ctx, p.cfg.Users.First+rand.IntN(size), labels); mine || err != nil { //nolint:gosec // no secret
			return u, err
		}
	}
	list, err := p.reservedUserVolumes(ctx) // for all engines on the daemon: they share the machine
	if err != nil {
		return user{}, err
	}
	taken := map[string]bool{}
	for _, v := range list {
		taken[v.Name] = true
	}
	start := rand.IntN(size) //nolint:gosec // no secret
	for i := range size {
		id := p.cfg.Users.First + (start+i)%size
		if taken[userVolumeName(id)] {
			continue
		}
		if u, mine, err := p.reserveUser(ctx, id, labels); mine || err != nil {
			return u, err
		}
	}
	return user{}, guest.WithCode(sandbox.CodeSandboxFailed, fmt.Sprintf("all user numbers of SPOOL_SANDBOX_UIDS, %s, are taken by sandboxes and kept workspaces: widen the range", p.cfg.Users), nil)
}

// reservedUserVolumes returns the volumes that reserve user numbers and have all of the given labels.
func (p *Provider) reservedUserVolumes(ctx context.Context, labels ...string) ([]*volume.Volume, error) {
	args := filters.NewArgs(filters.Arg("label", labelRole+"="+roleUser))
	for _, l := range labels {
		args.Add("label", l)
	}
	list, err := callEngine(ctx, p, "list users", func(ctx context.Context) (volume.ListResponse, error) {
		return p.api.VolumeList(ctx, volume.ListOptions{Filters: args})
	})
	return list.Volumes, err
}

// volumesUser returns the user that owns the volumes of the sandbox owner. Volumes of an earlier release have no label with the user;
// their user is earlierReleaseUser.
func (p *Provider) volumesUser(ctx context.Context, owner string) (user, error) {
	l, err := p.volumeLabels(ctx, workspaceVolumeName(owner))
	if err != nil {
		return user{}, err
	}
	if l[labelRole] != roleVolume {
		return user{}, fmt.Errorf("workspace of %s: %w", owner, errVanished)
	}
	if l[labelUser] == "" {
		return user{id: earlierReleaseUser}, nil
	}
	id := int(parseUintOrZero(l[labelUser])) //nolint:gosec // written here
	u, mine, err := p.reserveUser(ctx, id, p.reservationLabels(owner))
	if err == nil && !mine {
		err = fmt.Errorf("user %d of workspace %s is reserved by another sandbox: remove volume %s; the session gets its last snapshot", id, owner, workspaceVolumeName(owner))
	}
	return u, err
}

// serverUser returns the user of a sandbox's n-th MCP server and the labels of its reservation. If there is none, it reserves a user
// number.
func (p *Provider) serverUser(ctx context.Context, id string, n int) (user, map[string]string, error) {
	labels := p.reservationLabels(id)
	labels[labelSandbox], labels[labelServerDefinition] = id, strconv.Itoa(n)
	list, err := p.reservedUserVolumes(ctx, labelEngine+"="+p.cfg.Engine, labelVolumesOwner+"="+id, labelServerDefinition+"="+strconv.Itoa(n))
	if err != nil {
		return user{}, nil, err
	}
	if len(list) > 0 {
		return user{id: int(parseUintOrZero(strings.TrimPrefix(list[0].Name, userPrefix))), dir: list[0].Mountpoint}, labels, nil //nolint:gosec // written here
	}
	u, err := p.reserveNewUser(ctx, labels)
	return u, labels, err
}

// wrapVanished wraps an error of the engine in errVanished if the error names the passwd or group file of the user: another executor
// that tried to create the same container has removed the user's volume. It returns any other error unchanged.
func (u user) wrapVanished(err error) error {
	if u.dir != "" && errdefs.IsInvalidArgument(err) && strings.Contains(err.Error(), u.dir) {
		return fmt.Errorf("files of user %d: %w: %w", u.id, errVanished, err)
	}
	return err
}

// checkUserVolume returns an error that wraps errVanished unless the volume of a container's user has the labels of its reservation; see
// checkVolumes.
func (p *Provider) checkUserVolume(ctx context.Context, u user, labels map[string]string) error {
	if u.dir == "" {
		return nil
	}
	l, err := p.volumeLabels(ctx, userVolumeName(u.id))
	if err == nil && !hasReservationLabels(l, labels) {
		return fmt.Errorf("user %d: %w", u.id, errVanished)
	}
	return err
}

// releaseUser removes the volume that reserves a user number, unless a container mounts it or its labels are those of another sandbox.
// It also removes an empty volume that the engine created in place of a removed one.
func (p *Provider) releaseUser(ctx context.Context, u user, labels map[string]string) error {
	if u.dir == "" {
		return nil
	}
	l, err := p.volumeLabels(ctx, userVolumeName(u.id))
	if err != nil || l[labelRole] != "" && !hasReservationLabels(l, labels) {
		return err
	}
	_, err = p.removeVolume(ctx, userVolumeName(u.id))
	return err
}

// releaseUsers releases the user numbers that are reserved for a sandbox whose volumes are gone.
func (p *Provider) releaseUsers(ctx context.Context, owner string) error {
	for _, v := range []string{workspaceVolumeName(owner), stateVolumeName(owner)} {
		if l, err := p.volumeLabels(ctx, v); err != nil || l != nil {
			return err
		}
	}
	list, err := p.reservedUserVolumes(ctx, labelEngine+"="+p.cfg.Engine, labelVolumesOwner+"="+owner)
	for _, v := range list {
		_, rerr := p.removeVolume(ctx, v.Name)
		err = errors.Join(err, rerr)
	}
	return err
}

// releaseOldUsers releases the user numbers that were reserved before the time before, and whose owner is not in used.
func (p *Provider) releaseOldUsers(ctx context.Context, used map[string]bool, before time.Time) error {
	list, err := p.reservedUserVolumes(ctx, labelEngine+"="+p.cfg.Engine)
	if err != nil {
		return err
	}
	for _, v := range list {
		made, err := time.Parse(time.RFC3339, v.CreatedAt)
		if err != nil {
			return fmt.Errorf("volume %s: its date: %w", v.Name, err)
		}
		if owner := v.Labels[labelVolumesOwner]; !used[owner] && made.Before(before) {
			if err := p.releaseUsers(ctx, owner); err != nil {
				return err
			}
		}
	}
	return nil
}
