package resendapi

import (
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
)

// ids makes UUIDs (version 4 in form) out of serial numbers and a seed, and
// serial numbers out of UUIDs: the server needs no table of ids, and the same
// seed gives the same ids. They are not secret.
type ids struct{ seed uint64 }

func mix(x uint64) uint64 { // splitmix64's finaliser
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

const rounds = 4

// scramble is a permutation of 64 bits (a Feistel network).
func (d ids) scramble(n uint64) uint64 {
	l, r := uint32(n>>32), uint32(n)
	for i := range uint64(rounds) {
		l, r = r, l^uint32(mix(uint64(r)^d.seed^i<<40))
	}
	return uint64(l)<<32 | uint64(r)
}

func (d ids) unscramble(n uint64) uint64 {
	l, r := uint32(n>>32), uint32(n)
	for i := uint64(rounds); i > 0; i-- {
		l, r = r^uint32(mix(uint64(l)^d.seed^(i-1)<<40)), l
	}
	return uint64(l)<<32 | uint64(r)
}

func (d ids) bytes(serial int64) [16]byte {
	var b [16]byte
	n := d.scramble(uint64(serial))
	check := mix(n ^ d.seed)
	binary.BigEndian.PutUint64(b[8:], check)
	binary.BigEndian.PutUint16(b[6:], uint16(check>>48))
	binary.BigEndian.PutUint32(b[0:], uint32(n>>32))
	binary.BigEndian.PutUint16(b[4:], uint16(n>>16))
	binary.BigEndian.PutUint16(b[9:], uint16(n))
	b[6] = b[6]&0x0f | 0x40
	b[8] = b[8]&0x3f | 0x80
	return b
}

// uuid of a serial number.
func (d ids) uuid(serial int64) string {
	b := d.bytes(serial)
	var s [36]byte
	hex.Encode(s[0:8], b[0:4])
	hex.Encode(s[9:13], b[4:6])
	hex.Encode(s[14:18], b[6:8])
	hex.Encode(s[19:23], b[8:10])
	hex.Encode(s[24:36], b[10:16])
	s[8], s[13], s[18], s[23] = '-', '-', '-', '-'
	return string(s[:])
}

// serial of a UUID; ok is false when it was not made here.
func (d ids) serial(uuid string) (serial int64, ok bool) {
	b, ok := parseUUID(uuid)
	if !ok {
		return 0, false
	}
	n := uint64(binary.BigEndian.Uint32(b[0:]))<<32 |
		uint64(binary.BigEndian.Uint16(b[4:]))<<16 | uint64(binary.BigEndian.Uint16(b[9:]))
	serial = int64(d.unscramble(n))
	return serial, serial >= 0 && d.bytes(serial) == b
}

func parseUUID(s string) (b [16]byte, ok bool) {
	if len(s) != 36 || s[8] != '-' || s[13] != '-' || s[18] != '-' || s[23] != '-' {
		return b, false
	}
	digits := s[0:8] + s[9:13] + s[14:18] + s[19:23] + s[24:36]
	_, err := hex.Decode(b[:], []byte(digits))
	return b, err == nil
}

// secret is a webhook's signing secret.
func (d ids) secret(serial int64) string {
	b, c := d.bytes(serial), mix(uint64(serial)^d.seed)
	return "whsec_" + base64.StdEncoding.EncodeToString(binary.BigEndian.AppendUint64(b[:], c))
}

// message is a webhook message's id, as svix-id carries it.
func (d ids) message(serial int64) string {
	b := d.bytes(serial)
	return "msg_" + hex.EncodeToString(b[:])[:27]
}
