package smtp

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"runtime"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// heapGrownMost is how many bytes a mail with a new key and recipient may add
// to the heap for good. It adds four counts (tries of the recipient, tries of
// the key, copies, the key's newest row), each 12 bits of filter and an eighth
// of a byte of index once it stands in a file: 6.5 bytes. The rest is for how
// full the maps happen to be: 16 bytes are 2.4 MB from 40,000 to 200,000 mails.
const heapGrownMost = 16

// TestMemoryIsFlat sends 200,000 mails, no two keys or recipients alike. The
// first 40,000 fill what is bounded: rows, mails to look at, recent keys.
func TestMemoryIsFlat(t *testing.T) {
	filled, mails := 40_000, 200_000
	if testing.Short() || raceEnabled {
		mails = 60_000
	}
	srv, err := Start(Options{KeepRows: 4096, KeepBodies: 1 << 20})
	require.NoError(t, err)
	defer func() { require.NoError(t, srv.Close()) }()
	nc, err := net.Dial("tcp", srv.Addr())
	require.NoError(t, err)
	defer nc.Close()
	c := &pipeliner{t, nc, bufio.NewReader(nc)}
	c.answers(1)
	c.write("EHLO memory\r\n")
	c.answers(1)
	c.send(0, filled)
	before := heapBytes()
	c.send(filled, mails)
	grown := int64(heapBytes()) - int64(before)
	perMail := float64(grown) / float64(mails-filled)
	t.Logf("heap %.1f MB at %d mails, grown by %.2f MB up to %d: %.1f bytes a mail",
		float64(before)/(1<<20), filled, float64(grown)/(1<<20), mails, perMail)
	require.Less(t, perMail, float64(heapGrownMost))

	// What left memory is known as exactly as before.
	require.EqualValues(t, mails, srv.Totals().Stored)
	require.Zero(t, srv.Totals().Doubled)
	for _, n := range []int{0, filled, mails - 1} {
		c.send(n, n+1)
		v := srv.Verdict(fmt.Sprintf("k%d", n))
		require.Equal(t, "doubled", v.Verdict)
		require.Equal(t, 2, v.Attempts)
		require.Equal(t, map[string]int{fmt.Sprintf("r%d@x.test", n): 2}, v.Recipients)
	}
	verdicts := map[string]int{}
	for _, v := range srv.Verdicts() {
		verdicts[v.Verdict]++
	}
	require.Equal(t, map[string]int{"once": mails - 3, "doubled": 3}, verdicts)
}

// pipeliner hands over mails with few round trips.
type pipeliner struct {
	t  *testing.T
	nc net.Conn
	br *bufio.Reader
}

func (p *pipeliner) write(s string) {
	_, err := io.WriteString(p.nc, s)
	require.NoError(p.t, err)
}

func (p *pipeliner) answers(n int) {
	for n > 0 {
		line, err := p.br.ReadSlice('\n')
		require.NoError(p.t, err)
		require.LessOrEqual(p.t, line[0], byte('3'), "%s", line)
		if line[3] == ' ' {
			n--
		}
	}
}

// send sends the mails from and up to the numbers, several at once in flight.
func (p *pipeliner) send(from, to int) {
	const window = 16
	for from < to {
		n := min(window, to-from)
		var b strings.Builder
		for i := from; i < from+n; i++ {
			mail := fmt.Sprintf("Message-ID: <%d@x.test>\r\nX-Dedupe-Key: k%d\r\nSubject: memory\r\n\r\nHello.\r\n", i, i)
			fmt.Fprintf(&b, "MAIL FROM:<a@x.test>\r\nRCPT TO:<r%d@x.test>\r\nBDAT %d LAST\r\n%s", i, len(mail), mail)
		}
		p.write(b.String())
		p.answers(3 * n)
		from += n
	}
}

func heapBytes() uint64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}
