package scenarios

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
)

// restState is what a wait for the system to settle found.
type restState string

const (
	atRest  restState = "at rest"
	moving  restState = "moving"
	stalled restState = "stalled"
)

const (
	restPoll = 250 * time.Millisecond
	// restPolls in a row must find nothing pending: a message on its way from
	// one hop to the next may be in neither for an instant.
	restPolls = 2
	// maxStalled bounds the findings of one stall; the rest is counted.
	maxStalled = 20
)

// rest is the outcome of a wait.
type rest struct {
	state   restState
	pending map[string]string // what each unsettled mail waits for
	between map[string]string // what is unread or queued between the parts
	still   time.Duration     // for how long nothing had changed
}

func (r rest) describe() string {
	all := merged(r.pending, r.between)
	if len(all) == 0 {
		return "nothing is pending"
	}
	first := firstKeys(all, 3)
	for i, key := range first {
		first[i] = key + ": " + all[key]
	}
	return fmt.Sprintf("%d mails pending (%s)", len(r.pending), strings.Join(first, "; "))
}

// awaitRest polls until ask finds nothing pending, or bound has passed.
func (x *cellRun) awaitRest(ctx context.Context, bound time.Duration, ask func(context.Context) rest) rest {
	start := x.clock()
	moved, last, empty := start, "", 0
	for {
		r := ask(ctx)
		all := merged(r.pending, r.between)
		x.showPending(all)
		now := x.clock()
		if sign := x.signOfLife(all); sign != last {
			moved, last = now, sign
		}
		if empty++; len(all) > 0 {
			empty = 0
		}
		r.still = time.Duration(now - moved)
		switch over := time.Duration(now-start) >= bound; {
		case empty >= restPolls:
			r.state = atRest
			return r
		case over && r.still >= x.stallAfter():
			r.state = stalled
			return r
		case over || !pause(ctx, restPoll):
			r.state = moving
			return r
		}
	}
}

// mails is what the target's mails still wait for. What cannot be asked is not
// at rest.
func (x *cellRun) mails(ctx context.Context) rest {
	pending, err := x.bench.Target.Pending(ctx)
	if err != nil {
		return rest{between: map[string]string{"pending mails": "cannot be read: " + err.Error()}}
	}
	return rest{pending: pending}
}

// everything is mails, and what lies between the parts. Asking the broker's own
// tool costs half a second of CPU, and its figures are up to five seconds old:
// it is asked only once the mails have settled.
func (x *cellRun) everything(ctx context.Context) rest {
	r := x.mails(ctx)
	if x.bench.Unrest == nil || len(r.pending)+len(r.between) > 0 {
		return r
	}
	var err error
	if r.between, err = x.bench.Unrest(ctx); err != nil {
		r.between = map[string]string{"queues and topics": "cannot be read: " + err.Error()}
	}
	return r
}

func merged(a, b map[string]string) map[string]string {
	all := make(map[string]string, len(a)+len(b))
	maps.Copy(all, a)
	maps.Copy(all, b)
	return all
}

// signOfLife changes whenever the system gets on: another set of pending mails,
// another reason, another attempt at the far side. Digits are left out of the
// reasons, since a countdown is no progress.
func (x *cellRun) signOfLife(pending map[string]string) string {
	var b strings.Builder
	if x.bench.Attempts != nil {
		fmt.Fprintf(&b, "%d\n", x.bench.Attempts())
	}
	for _, key := range slices.Sorted(maps.Keys(pending)) {
		b.WriteString(key)
		b.WriteString(strings.Map(func(r rune) rune {
			if r >= '0' && r <= '9' {
				return -1
			}
			return r
		}, pending[key]))
		b.WriteByte('\n')
	}
	return b.String()
}

// stallAfter is how long a working system may show no sign of life: a mail may
// be waiting for its longest delay, or for a lease to run out.
func (x *cellRun) stallAfter() time.Duration {
	wait := x.scenario.System.Lease
	for _, d := range x.scenario.System.RetryDelays {
		wait = max(wait, d)
	}
	return wait + 10*time.Second
}

func (x *cellRun) showPending(pending map[string]string) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.pending = pending
}

func firstKeys(m map[string]string, n int) []string {
	keys := slices.Sorted(maps.Keys(m))
	return keys[:min(n, len(keys))]
}
