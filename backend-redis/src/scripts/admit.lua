#!lua
-- Admits keys: first one wins.
-- KEYS: for each key its entry, the last token of its slot, the mark of a request given up
-- ARGV: 1 how long to keep a last token in ms, then for each key: owner,
--       how long until it can be taken over in ms (0: done at once),
--       how long it is kept once done in ms, "p" or (reserved by a claim) "c"
-- Returns for each key {1, token}, {2, µs since when in progress}, {3, µs when it was done},
-- {4, µs since when reserved by a claim}, or {-1} for a request that was given up.
--
-- An entry is a string "<state>:<owner>:<token>:<since µs>:<until µs>", state d for done.
local answers = {}
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
for n = 0, #KEYS / 3 - 1 do
  local entry, lastkey, mark = KEYS[3 * n + 1], KEYS[3 * n + 2], KEYS[3 * n + 3]
  local owner, within, retain, mode =
    ARGV[4 * n + 2], tonumber(ARGV[4 * n + 3]), tonumber(ARGV[4 * n + 4]), ARGV[4 * n + 5]
  local values = redis.call('MGET', entry, lastkey, mark)
  local state, by, token, since, till
  if values[1] then
    state, by, token, since, till = string.match(values[1], '^(%a):(%x+):(%d+):(%d+):(%d+)$')
  end
  if by == owner then
    answers[n + 1] = {1, token}
  elseif state == 'd' then
    answers[n + 1] = {3, since}
  elseif state and tonumber(till) > now then
    answers[n + 1] = {state == "c" and 4 or 2, since}
  elseif values[3] then
    answers[n + 1] = {-1}
  else
    local fresh, last = now, tonumber(values[2] or '0')
    if last >= fresh then fresh = last + 1 end
    local text, since = string.format('%.0f', fresh), string.format('%.0f', now)
    local keep = ARGV[1] + math.ceil((fresh - now) / 1000)
    redis.call('SET', lastkey, text, 'PX', string.format('%.0f', keep))
    if within == 0 then
      redis.call('SET', entry, 'd:' .. owner .. ':' .. text .. ':' .. since .. ':0',
        'PX', string.format('%.0f', retain))
    else
      local till = string.format('%.0f', now + within * 1000)
      -- after `within` it can be taken over, and until then the late owner can still complete
      redis.call('SET', entry, mode .. ':' .. owner .. ':' .. text .. ':' .. since .. ':' .. till,
        'PX', string.format('%.0f', within + retain))
    end
    answers[n + 1] = {1, text}
  end
end
return answers
