#!lua
-- Applies the queued writes of a claim and frees its locks, if everything is still held.
-- KEYS: the claim's locks, the verified leases, the entries that it admits, the keys written
-- ARGV: 1 owner, 2 number of locks, 3 number of leases, 4 number of entries,
--       5 PUBLISH or SPUBLISH, 6 channel, then for each lock what to publish, for each lease its
--       owner, for each entry how long it is kept in ms, then for each write: the type that its
--       key must have, number of words, number of the first word that is a key, the words
-- Returns {1}, {0, number of the key that is held no longer}, or with the locks freed
-- {-1, number of the write, why} with nothing written, {-2, number, why} with the earlier ones
-- written.
local owner = ARGV[1]
local locks, leases, entries = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local at = 7
local function holds(key, who)
  local held = redis.call('GET', key)
  return held and string.sub(held, 1, 32) == who and held
end

local wanted = {}
for i = 1, locks do
  local held = holds(KEYS[i], owner)
  if not held then return {0, i} end
  wanted[i] = string.sub(held, -1) == '!'
end
local news = at
at = at + locks
for i = 1, leases do
  if not holds(KEYS[locks + i], ARGV[at]) then return {0, locks + i} end
  at = at + 1
end
local kept = {}
for i = 1, entries do
  local held = redis.call('GET', KEYS[locks + leases + i])
  local by, token, since
  if held then by, token, since = string.match(held, '^c:(%x+):(%d+):(%d+):') end
  if by ~= owner then return {0, locks + leases + i} end
  kept[i] = {'d:' .. owner .. ':' .. token .. ':' .. since .. ':0', ARGV[at]}
  at = at + 1
end

local function free()
  for i = 1, locks do
    redis.call('DEL', KEYS[i])
    if wanted[i] then redis.call(ARGV[5], ARGV[6], ARGV[news + i - 1]) end
  end
end

-- what can be known to fail is found before anything is written
local writes, types, numbers = {}, {}, {}
local function type_of(key)
  if not types[key] then types[key] = redis.call('TYPE', key).ok end
  return types[key]
end
local function refuse(why)
  free()
  for i = 1, entries do redis.call('DEL', KEYS[locks + leases + i]) end
  return {-1, #writes, why}
end
while ARGV[at] do
  local kind, count, first = ARGV[at], tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2])
  local words = {}
  for i = 1, count do words[i] = ARGV[at + 2 + i] end
  at = at + 3 + count
  writes[#writes + 1] = words
  local name, key = words[1], words[first + 1]
  if not redis.acl_check_cmd(unpack(words)) then
    return refuse('NOPERM the user may not run ' .. name .. ' on this key')
  end
  if kind == 'none' then
    for i = 2, count do types[words[i]], numbers[words[i]] = 'none', nil end
  elseif kind == 'replaced' then
    types[key], numbers[key] = 'string', name == 'SET' and words[3] or true
  elseif kind == 'unknown' then
    for i = 2, count do types[words[i]] = 'unknown' end
  elseif kind ~= 'any' then
    local found = type_of(key)
    if found ~= 'none' and found ~= 'unknown' and found ~= kind then
      return refuse('WRONGTYPE ' .. name .. ' on a key that holds a ' .. found)
    end
    if name == 'INCRBY' or name == 'DECRBY' or name == 'INCR' or name == 'DECR' then
      local number = numbers[key]
      if number == nil and found == 'string' then number = redis.call('GET', key) end
      if number and number ~= true and not string.match(number, '^-?%d+$') then
        return refuse('ERR value is not an integer')
      end
      numbers[key] = true
    elseif name == 'HINCRBY' and found == 'hash' then
      local number = redis.call('HGET', key, words[3])
      if number and not string.match(number, '^-?%d+$') then
        return refuse('ERR hash value is not an integer')
      end
    elseif kind == 'string' then
      numbers[key] = true
    end
    types[key] = kind
  end
end

for i = 1, #writes do
  local done = redis.pcall(unpack(writes[i]))
  if type(done) == 'table' and done.err then
    free()
    for n = 1, entries do redis.call('DEL', KEYS[locks + leases + n]) end
    return {i == 1 and -1 or -2, i, done.err}
  end
end
for i = 1, entries do
  redis.call('SET', KEYS[locks + leases + i], kept[i][1], 'PX', kept[i][2])
end
free()
return {1}
