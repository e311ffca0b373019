#!lua flags=no-writes
-- Reads what is held.
-- KEYS: locks and entries
-- Returns the µs since 1970, then for each key its value and the ms that it has left; for one
-- that is none of ours an empty text.
local time = redis.call('TIME')
local seen = {time[1] .. string.sub('00000' .. time[2], -6)}
for i = 1, #KEYS do
  local held = redis.pcall('GET', KEYS[i])
  local is_text = type(held) == 'string'
  seen[2 * i] = is_text and held or ''
  seen[2 * i + 1] = is_text and redis.call('PTTL', KEYS[i]) or -2
end
return seen
