package events

import (
	"fmt"
	"strings"

	"github.com/spoolhq/spool/pkg/truncate"
)

// Partitioning defines how a log distributes ids over partitions, and partitions over the projector's groups. Its value
// is the number of partitions that the metadata of the log's streams records: a power of two up to MaxPartitions. Each
// partition is a group, so that a group's consumer has one filter subject. The value 0 means a log without a recorded
// number, which has 64 partitions in 8 groups.
type Partitioning uint8

// unrecordedGroupCount is the number of groups of a log without a recorded number of partitions.
const unrecordedGroupCount = 8

// CheckPartitions returns an error if n cannot be the number of partitions of a log.
func CheckPartitions(n int) error {
	if n < 1 || n > MaxPartitions || MaxPartitions%n != 0 {
		return fmt.Errorf("%d is not 1, 2, 4, 8, 16, 32 or %d", n, MaxPartitions)
	}
	return nil
}

// PartitionCount returns the number of partitions.
func (p Partitioning) PartitionCount() int {
	if p == 0 {
		return MaxPartitions
	}
	return int(p)
}

// GroupCount returns the number of the projector's groups. They are numbered from 0.
func (p Partitioning) GroupCount() int {
	if p == 0 {
		return unrecordedGroupCount
	}
	return int(p)
}

// PartitionOf returns the partition of a session id or catalogue id.
func (p Partitioning) PartitionOf(id string) int { return Partition(id) % p.PartitionCount() }

// GroupOfID returns the projector group of a session id or catalogue id. The group is also the key of its checkpoint.
func (p Partitioning) GroupOfID(id string) int { return Partition(id) % p.GroupCount() }

// GroupOfPartition returns the projector group of a partition.
func (p Partitioning) GroupOfPartition(partition int) int { return partition % p.GroupCount() }

// PartitionsInGroup returns the partitions of a projector group, ascending.
func (p Partitioning) PartitionsInGroup(group int) []int {
	var list []int
	for n := group; n < p.PartitionCount(); n += p.GroupCount() {
		list = append(list, n)
	}
	return list
}

// Subject returns the NATS subject on which the log stores the commits of s. The caller must have validated s with
// Check.
func (p Partitioning) Subject(s Subject) string {
	return "ev." + PartitionToken(p.PartitionOf(s.ID)) + "." + s.Tenant + "." + s.ID + "." + string(s.Aspect)
}

// ParseSubject parses a NATS subject of the log. It returns an error if the partition does not belong to the id.
func (p Partitioning) ParseSubject(subject string) (Subject, error) {
	t := strings.Split(subject, ".")
	if len(t) != 5 || t[0] != "ev" {
		return Subject{}, fmt.Errorf("subject %q is not ev.<partition>.<tenant>.<id>.<aspect>", truncate.Text(subject, 200))
	}
	s := Subject{Tenant: t[2], ID: t[3], Aspect: Aspect(t[4])}
	if err := s.Check(); err != nil {
		return Subject{}, fmt.Errorf("subject %q: %w", truncate.Text(subject, 200), err)
	}
	if own := PartitionToken(p.PartitionOf(s.ID)); t[1] != own {
		return Subject{}, fmt.Errorf("subject %q: partition %s is not the id's %s", truncate.Text(subject, 200), t[1], own)
	}
	return s, nil
}
